"""A new serving process, forked from its parent."""

from __future__ import annotations

import os
import signal
import socket

from asyncllm.supervise.signals import HANDLED, STOPS
from asyncllm.supervise.standard_files import flush


def fork() -> tuple[int, socket.socket]:
    """Fork this process, which must have one thread. The new process dies with it.

    Returns:
        As ``os.fork`` does, and this process's end of a channel to the other one, which keeps the
        boundaries of messages.

    Raises:
        OSError: the system allows no new process, or no file descriptor for it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flush()
    me = os.getpid()
    # No handler of ours may run in the new process.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        ours.close()
        _begin(me)
        return 0, theirs
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    theirs.close()
    ours.setblocking(False)
    return pid, ours


def _begin(parent: int) -> None:
    """In the new process."""
    from asyncllm.system.child_process import die_with

    die_with(parent)
    for number in (*STOPS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can read its configuration again
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
