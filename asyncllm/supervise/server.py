"""A serving process, as the process that supervises it sees it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from asyncllm.supervise.restarts import Restarts

if TYPE_CHECKING:
    import socket


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

    def began(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel

    def tell(self, message: bytes) -> None:
        """Send this to its process, which may be dead by now."""
        if self.channel is not None:
            with suppress(OSError):
                self.channel.send(message)

    def ended(self) -> None:
        """Its process is gone."""
        if self.channel is not None:
            self.channel.close()
        self.pid = self.channel = None
        self.accepts = self.is_ready = False
