"""A process that has imported what a server needs, and waits to become the server."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

from asyncllm.supervise.child import TAKE_OVER


class Standby:
    """The place for such a process, as the process that supervises it sees it.

    Attributes:
        pid: of the process; None while there is none.
        is_due: one is to be started.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self.is_due = False
        self._channel: socket.socket | None = None

    def began(self, pid: int, channel: socket.socket) -> None:
        self.pid, self._channel, self.is_due = pid, channel, False

    def take_over(self, restarts: int, memory: int | None) -> tuple[int, socket.socket] | None:
        """Have the process serve, which is a server from now on.

        Args:
            restarts: how many servers have died before it.
            memory: a file, which becomes ``Parent.memory``.

        Returns:
            Its process id and the channel to it; None if there is no such process, or it is dead.
        """
        if self.pid is None or self._channel is None:
            return None
        files = [] if memory is None else [memory]
        try:
            socket.send_fds(self._channel, [TAKE_OVER + b"%d" % restarts], files)
        except OSError:
            self.kill()
            return None
        taken = self.pid, self._channel
        self.pid = self._channel = None
        return taken

    def ended(self) -> None:
        """The process is gone, or it belongs to another process than this one."""
        if self._channel is not None:
            self._channel.close()
        self.pid = self._channel = None

    def kill(self) -> None:
        """Returns when there is no process any more; it holds nothing that needs care."""
        self.is_due = False
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self.ended()
