"""A serving process, as the process that supervises it sees it, and when the next one starts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from asyncllm.supervise.child import LEAVING, READY, RELOADED, REMEMBER, content_of, send

#: Between two checks of a child. They are counted, not seconds: a parent that was stopped together
#: with its children must not blame them.
CHECK_SECONDS: Final = 1.0
#: A child is lost that is stopped, as by SIGSTOP, in so many checks in a row.
STOPPED_CHECKS: Final = 3
#: And one that sleeps without using a processor in so many, although it owes its parent something.
STILL_CHECKS: Final = 15
#: Checks in which a new process accepts connections; the model is not loaded before.
PATIENCE: Final = 300
#: A server that was ready for this long starts without a delay when it dies.
STEADY_SECONDS: Final = 60.0
#: The delay doubles with each death up to this.
LONGEST_DELAY: Final = 30.0
#: After this many doublings it is above that.
MOST_DOUBLINGS: Final = 5
#: So many starts in a row that do not become ready are enough.
FAILED_STARTS: Final = 5


class Progress:
    """One child, from its start to its end."""

    def __init__(self, pid: int):
        self._folder = Path(f"/proc/{pid}")
        self._stopped = self._still = self._waited = 0
        self._used = ""

    def check(self, patience: int | None) -> str | None:
        """Check once.

        Args:
            patience: in how many checks the child is to do what it owes; None if it owes nothing.

        Returns:
            Why the child is lost, for the log; None while it is not.
        """
        try:
            stat = (self._folder / "stat").read_text(encoding="utf-8")
        except OSError:  # it has ended, as a signal will say
            return None
        state, *fields = stat.rpartition(")")[2].split()
        # A debugger's stop is another state, and does not count.
        self._stopped = self._stopped + 1 if state == "T" else 0
        if self._stopped >= STOPPED_CHECKS:
            return "is stopped"
        if patience is None:
            self._waited = self._still = 0
            return None
        used = f"{fields[10]} {fields[11]} {self._nanoseconds()}"
        self._still = self._still + 1 if state == "S" and used == self._used else 0
        self._used = used
        self._waited += 1
        if self._still >= STILL_CHECKS:
            return f"hangs: it has done nothing for {STILL_CHECKS * CHECK_SECONDS:.0f} s"
        if self._waited >= patience:
            return f"hangs: it is not done after {patience * CHECK_SECONDS:.0f} s"
        return None

    def _nanoseconds(self) -> str:
        """What the main thread has run, finer than the ticks of all threads; empty if unknown."""
        try:
            return (self._folder / "schedstat").read_text(encoding="utf-8").split()[0]
        except (OSError, IndexError):
            return ""


class Remembered:
    """What servers serve by, in a file: those that are started get it. It may have changed since.

    Attributes:
        file: None if no server has said anything yet.
    """

    def __init__(self) -> None:
        self.file: int | None = None

    def replace(self, file: int) -> None:
        """This one counts from now on; it belongs to this object."""
        self.close()
        self.file = file

    def content(self) -> bytes:
        return b"" if self.file is None else content_of(self.file)

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file = None


class Server:
    """One place for a server: its process now, and those before.

    Attributes:
        index: among those that the supervisor runs.
        pid: of its process; None between two.
        channel: to that process; open as long as it runs.
        accepts: it has said that it accepts connections.
        is_ready: it has loaded the model.
        is_stopped: by a signal, and has not been continued.
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
        self.is_ready = self.is_stopped = False
        self.hung_up = False
        self.start_at: float | None = None
        self.stood_by = self.was_killed = False
        self._progress: Progress | None = None
        self._patience = PATIENCE

    def began(self, pid: int, channel: socket.socket, patience: int | None = None) -> None:
        """
        Args:
            patience: of a standby: in how many checks it accepts connections.
        """
        self.pid, self.channel = pid, channel
        self.stood_by, self.was_killed = patience is not None, False
        self._progress, self._patience = Progress(pid), patience or PATIENCE

    def accepted(self, memory: int | None) -> None:
        """Its process accepts connections from now on.

        Args:
            memory: a file with what others serve by, if there are others.
        """
        self.accepts = True
        self.stood_by = False
        if memory is not None and self.channel is not None:
            with suppress(OSError):  # it is dead
                send(self.channel, REMEMBER, [memory])

    def heard(self, message: bytes) -> None:
        """Its process says how it is."""
        if message.startswith(READY):
            self.is_ready = True
            self.restarts.ready()
        elif message == LEAVING:
            self.is_ready = False
        elif message == RELOADED:
            self.hung_up = False

    def check(self) -> str | None:
        """Why the process is lost, if it is; to be called again and again.

        Once it accepts connections, it watches its own threads.
        """
        if self._progress is None or self.was_killed:
            return None
        return self._progress.check(None if self.accepts else self._patience)

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
        self.accepts = self.is_ready = self.is_stopped = False


class Restarts:
    """Counts deaths. The first restart is immediate, the next ones after 1, 2, 4... seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.count = 0
        self._clock = clock
        self._ready_at: float | None = None
        self._was_ready = False
        self._deaths = 0  # since it was last steady
        self._failed = 0  # starts in a row

    def ready(self) -> None:
        """The server serves."""
        self._ready_at = self._clock()
        self._was_ready = True

    def delay(self, *, again: bool = False) -> float | None:
        """The server has died: seconds to wait before the next start, or None to give up.

        Args:
            again: start it again although it has never been ready: others serve with the same
                options, or it did not fail by itself. Else it would fail in the same way.
        """
        if not (self._was_ready or again):
            return None
        if self._ready_at is None:
            self._failed += 1
        else:
            self._failed = 0
            if self._clock() - self._ready_at >= STEADY_SECONDS:
                self._deaths = 0
        if self._failed >= FAILED_STARTS:
            return None
        self._ready_at = None
        self._deaths += 1
        self.count += 1
        if self._deaths == 1:
            return 0.0
        # A power of the number of deaths would not fit a float after a thousand of them.
        return min(2.0 ** min(self._deaths - 2, MOST_DOUBLINGS), LONGEST_DELAY)
