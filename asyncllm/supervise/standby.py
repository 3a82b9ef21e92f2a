"""A process that has imported what a server needs, and waits to become the server."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from typing import Final

from asyncllm.supervise.child import PING, TAKE_OVER, send
from asyncllm.supervise.server import Progress

#: Checks in which a process that stands by answers, or becomes the server.
AT_ONCE: Final = 10
#: Checks in which it has imported everything: before it stands by, and when a server is missing.
IMPORT: Final = 600
IMPORT_SOON: Final = 30
#: How long processes that were killed are waited for: a driver may not let go of one.
END_SECONDS: Final = 1.0


class Standby:
    """The place for such a process, as the process that supervises it sees it.

    Attributes:
        pid: of the process; None while there is none.
        is_due: one is to be started.
        killed: those that were killed, and have not ended yet.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self.is_due = False
        self.killed: set[int] = set()
        self._channel: socket.socket | None = None
        self._progress: Progress | None = None
        self._is_asked = self._has_answered = False

    def began(self, pid: int, channel: socket.socket) -> None:
        self.pid, self._channel, self.is_due = pid, channel, False
        self._progress = Progress(pid)
        self._is_asked = self._has_answered = False

    def check(self) -> str | None:
        """Why the process is lost, if it is; to be called again and again.

        It answers pings while it waits, and as soon as it has imported everything.
        """
        if self._channel is None or self._progress is None:
            return None
        with suppress(OSError):
            if self._is_asked and self._channel.recv(1):
                self._is_asked, self._has_answered = False, True
        was_asked = self._is_asked
        if not was_asked:
            with suppress(OSError):
                self._channel.send(PING)
                self._is_asked = True
        patience = AT_ONCE if self._has_answered else IMPORT
        return self._progress.check(patience if was_asked else None)

    def take_over(self, restarts: int, memory: int | None) -> tuple[int, socket.socket, int] | None:
        """Have the process serve, which is a server from now on.

        Args:
            restarts: how many servers have died before it.
            memory: a file, which becomes ``Parent.memory``.

        Returns:
            Its process id, the channel to it, and in how many checks it is to accept connections;
            None if there is no such process, or it is dead.
        """
        if self.pid is None or self._channel is None:
            return None
        files = [] if memory is None else [memory]
        try:
            send(self._channel, TAKE_OVER + b"%d" % restarts, files)
        except OSError:
            self.kill()
            return None
        taken = self.pid, self._channel, AT_ONCE if self._has_answered else IMPORT_SOON
        self.pid = self._channel = self._progress = None
        return taken

    def ended(self) -> None:
        """The process is gone, or it belongs to another process than this one."""
        if self._channel is not None:
            self._channel.close()
        self.pid = self._channel = self._progress = None

    def kill(self, *, is_due: bool = False) -> None:
        """It holds nothing that needs care.

        Args:
            is_due: another one is to be started.
        """
        self.is_due = is_due
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self.killed.add(self.pid)
        self.ended()

    def await_killed(self) -> None:
        """Wait until what was killed has ended, but not for long."""
        until = time.monotonic() + END_SECONDS
        for pid in self.killed:
            with suppress(ChildProcessError):  # it was collected with others
                while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
                    time.sleep(0.005)
