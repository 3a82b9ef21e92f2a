"""Processes that must not outlive the one that started them. Linux only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have Linux kill this process when the thread that started it ends, however that happens.

    The thread, not its process: start such a process in a thread that lives as long as it should.
    A thread that has ended before this call is noticed only if its process has ended, too.

    Args:
        parent: the process id of that thread.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def die_at_end_of(pipe: int) -> None:
    """Have Linux kill this process when the last write end of a pipe is closed.

    The kernel sends the signal, so that even a process that never gives up the GIL dies. Nothing
    may be written to the pipe, and no other process may have its read end.

    Args:
        pipe: the read end, to be kept open.
    """
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if poll.poll(0):  # it was closed before
        os._exit(1)
