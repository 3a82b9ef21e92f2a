"""Supervisor: holds the listening sockets and keeps a serving process alive.

It imports neither torch nor asyncio, so it takes little memory and starts a server by ``fork``.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

from asyncllm.supervise.child import ACCEPT, HAND_OVER, READY, Parent
from asyncllm.supervise.held import Held
from asyncllm.supervise.outage import Outage
from asyncllm.supervise.poller import Poller
from asyncllm.supervise.restarts import Restarts
from asyncllm.supervise.signals import DEAD, FORWARDED_STOP, GRACE_SECONDS, SAME_SECONDS, STOPS
from asyncllm.supervise.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

#: A server that does not end by itself in the time that it has is killed this much later.
KILL_SECONDS: Final = 1.0
#: Before the next attempt, when the system allows no new process.
FORK_SECONDS: Final = 1.0

_HANDLED: Final = (*STOPS, signal.SIGHUP, signal.SIGCHLD)


class Supervisor:
    """One for a process, and for its main thread. The process must have no other thread."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        drain_seconds: float,
        tls: tuple[str, str] | None = None,
    ):
        """
        Args:
            drain_seconds: a server ends in this time and GRACE_SECONDS after the first signal, and
                in GRACE_SECONDS after the second.
            tls: files of a certificate and its key.
        """
        self._sockets = sockets
        self._limits = (drain_seconds + GRACE_SECONDS, GRACE_SECONDS)
        self._poller = Poller()
        self._outage = Outage(self._poller, sockets, self._retry_seconds, tls)
        self._held = Held(self._outage)
        self._restarts = Restarts()
        self._terminal = Terminal()
        self._child: _Child | None = None
        self._start_at: float | None = None
        self._signals = 0
        self._signalled_at = -SAME_SECONDS
        self._kill_at: float | None = None
        self._exit_code: int | None = None
        self._wakeup, self._woken = socket.socketpair()

    def run(self) -> int | Parent:
        """Serve; returns like ``fork``, in several processes.

        Returns:
            In each serving process, its ``Parent``. In the process that called, the exit code,
            when all is over.
        """
        for end in (self._wakeup, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        for number in _HANDLED:
            signal.signal(number, _wake)
        self._poller.add(self._wakeup, self._on_wakeup)
        self._outage.open()
        self._start_at = time.monotonic()
        while self._exit_code is None:
            now = time.monotonic()
            if self._start_at is not None and now >= self._start_at:
                self._start_at = None
                parent = self._start()
                if parent is not None:
                    return parent
            if self._kill_at is not None and now >= self._kill_at and self._child is not None:
                log.error("the server does not end: killing it")
                self._kill_at = None
                os.kill(self._child.pid, signal.SIGKILL)
            self._outage.expire()
            self._held.expire()
            if self._child is not None and self._child.is_ready:
                self._held.send(self._child.channel)
            deadlines = (self._outage.deadline, self._held.deadline)
            times = (self._start_at, self._kill_at, *deadlines)
            next_at = min((at for at in times if at is not None), default=None)
            self._poller.wait(None if next_at is None else next_at - time.monotonic())
        self._close()
        for listening in self._sockets:
            listening.close()
        return self._exit_code

    def _start(self) -> Parent | None:
        """Fork; returns a ``Parent`` in the new process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        me = os.getpid()
        # No handler of ours may run in the new process.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            pid = os.fork()
        except OSError as error:
            log.error("cannot start the server, will keep trying: %s", error)
            pid = -1
        if pid == 0:
            ours.close()
            self._leave(me)
            return Parent(self._sockets, theirs, self._restarts.count)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        theirs.close()
        if pid < 0:
            ours.close()
            self._start_at = time.monotonic() + FORK_SECONDS
            return None
        ours.setblocking(False)
        self._child = _Child(pid, ours)
        self._poller.add(ours, self._on_message)
        return None

    def _leave(self, parent: int) -> None:
        """Become a serving process: give up all that is the parent's, and die with it."""
        from asyncllm.child_process import die_with

        die_with(parent)
        for number in (*STOPS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can read its configuration again
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        self._close()

    def _close(self) -> None:
        """Close what is the parent's alone."""
        signal.set_wakeup_fd(-1)
        self._wakeup.close()
        self._woken.close()
        self._outage.drop()
        self._held.drop()

    # -- what the server says --------------------------------------------------------------------

    def _on_message(self) -> None:
        child = self._child
        while child is not None:
            try:
                message, files, _, _ = socket.recv_fds(child.channel, 64, 2)
            except OSError:
                return
            if not message:  # it ends; SIGCHLD says how
                self._poller.remove(child.channel)
                return
            if message == ACCEPT:
                child.accepts = True
                self._outage.close()
                child.channel.send(ACCEPT)
                if child.hung_up:
                    os.kill(child.pid, signal.SIGHUP)
            elif message == READY:
                child.is_ready = True
                self._restarts.ready()
            elif message == HAND_OVER and len(files) == 2:
                child.is_ready = False  # it is about to end
                self._held.add(files)

    def _reap(self) -> None:
        """Collect all children that have ended: as process 1 of a container, strangers too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._child is not None and pid == self._child.pid:
                self._ended(os.waitstatus_to_exitcode(status))

    def _ended(self, code: int) -> None:
        """The server has ended, with this code or by the signal of this number, negated."""
        assert self._child is not None
        self._on_message()  # its last words
        self._poller.remove(self._child.channel)
        self._child.channel.close()
        self._child = None
        if self._signals:
            asked = code in (-FORWARDED_STOP, *(-number for number in STOPS))
            self._exit_code = 0 if asked else _exit_code(code)
        elif code == 0:
            self._exit_code = 0  # somebody has stopped it
        else:
            self._restart(code)

    def _restart(self, code: int) -> None:
        delay = self._restarts.delay()
        if delay is None:
            if self._restarts.count:
                log.error("the server has ended %s again and again: giving up", _cause(code))
            elif code < 0:
                log.error("the server has ended %s before it was ready", _cause(code))
            self._exit_code = _exit_code(code)
            return
        when = f"in {delay:.0f} s" if delay else "now"
        log.error("the server has ended %s: starting it again %s", _cause(code), when)
        self._start_at = time.monotonic() + delay
        self._outage.open()

    def _retry_seconds(self) -> float:
        return 0.0 if self._start_at is None else self._start_at - time.monotonic()

    # -- signals ---------------------------------------------------------------------------------

    def _on_wakeup(self) -> None:
        for number in self._wakeup.recv(4096):
            if number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGHUP and not self._terminal.hung_up():
                self._hang_up()
            elif number in (*STOPS, signal.SIGHUP):
                self._stop()

    def _hang_up(self) -> None:
        child = self._child
        if child is not None and child.accepts:
            os.kill(child.pid, signal.SIGHUP)
        elif child is not None:
            child.hung_up = True

    def _stop(self) -> None:
        now = time.monotonic()
        if now - self._signalled_at < SAME_SECONDS:
            return
        self._signalled_at = now
        self._signals += 1
        if self._child is None:
            self._exit_code = 0
            return
        os.kill(self._child.pid, FORWARDED_STOP)
        seconds = self._limits[self._signals - 1] if self._signals <= len(self._limits) else 0.0
        kill_at = now + seconds + KILL_SECONDS
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)


class _Child:
    """A serving process."""

    def __init__(self, pid: int, channel: socket.socket):
        self.pid = pid
        self.channel = channel
        self.accepts = False
        self.is_ready = False
        self.hung_up = False  # a SIGHUP came before it could take it


def _wake(number: int, frame: object) -> None:
    """Python writes the signal's number to the wake-up socket only if it has a handler."""


def _exit_code(code: int) -> int:
    """As a shell says it: 128 and the number of the signal."""
    return code if code >= 0 else 128 - code


def _cause(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"by {name}{hint}"
    return f"with status {code}" + (", its engine dead or stalled" if code == DEAD else "")
