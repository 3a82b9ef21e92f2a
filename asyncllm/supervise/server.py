"""A serving process, as the process that supervises it sees it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from asyncllm.supervise.progress import Progress
from asyncllm.supervise.restarts import Restarts

if TYPE_CHECKING:
    import socket

#: Looks in which a new process accepts connections; the model is not loaded before.
PATIENCE: Final = 300


class Server:
    """One place for a server: its process now, and those before.

    Attributes:
        index: among those that the supervisor runs.
        pid: of its process; None between two.
        channel: to that process; open as long as it runs.
        accepts: it has said that it accepts connections.
        is_ready: it has loaded the model.
        hung_up: a SIGHUP has come that no process has heeded yet.
        start_at: when the next process is to be started.
        stood_by: the process was a standby before, and does not accept connections yet.
        was_killed: it made no progress, so the parent has killed it.
    """

    def __init__(self, index: int):
        self.index = index
        self.restarts = Restarts()
        self.pid: int | None = None
        self.channel: socket.socket | None = None
        self.accepts = False
        self.is_ready = False
        self.hung_up = False
        self.start_at: float | None = None
        self.stood_by = self.was_killed = False
        self._progress: Progress | None = None
        self._patience = PATIENCE

    def began(self, pid: int, channel: socket.socket, patience: int | None = None) -> None:
        """
        Args:
            patience: of a standby: in how many looks it accepts connections.
        """
        self.pid, self.channel = pid, channel
        self.stood_by, self.was_killed = patience is not None, False
        self._progress, self._patience = Progress(pid), patience or PATIENCE

    def accepted(self) -> None:
        """Its process accepts connections from now on."""
        self.accepts = True
        self.stood_by = False

    def look(self) -> str | None:
        """Why the process is lost, if it is; to be called again and again.

        Once it accepts connections, it looks after its own threads.
        """
        if self._progress is None or self.was_killed:
            return None
        return self._progress.look(None if self.accepts else self._patience)

    def tell(self, message: bytes) -> None:
        """Send this to its process, which may be dead by now."""
        if self.channel is not None:
            with suppress(OSError):
                self.channel.send(message)

    def ended(self) -> None:
        """Its process is gone."""
        if self.channel is not None:
            self.channel.close()
        self.pid = self.channel = self._progress = None
        self.accepts = self.is_ready = False
