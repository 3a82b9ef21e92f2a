"""Supervisor: holds the listening sockets and keeps serving processes alive.

It imports neither torch nor asyncio, so it takes little memory and starts a server by ``fork``.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from asyncllm.supervise.child import ACCEPT, REMEMBER, STANDBY, Parent, fork, receive
from asyncllm.supervise.door import MakesDoor, SingleDoor
from asyncllm.supervise.poller import Poller
from asyncllm.supervise.server import CHECK_SECONDS, Remembered, Server
from asyncllm.supervise.signals import (
    FORWARDED_STOP,
    GRACE_SECONDS,
    HANDLED,
    SAME_SECONDS,
    STOPS,
    Terminal,
    cause_of,
    exit_code,
)
from asyncllm.supervise.standby import Standby

log = logging.getLogger(__name__)

#: A server that does not end by itself in the time that it has is killed this much later.
KILL_SECONDS: Final = 1.0
#: Before the next attempt, when the system allows no new process.
FORK_SECONDS: Final = 1.0


class Supervisor:
    """One for a process, and for its main thread. The process must have no other thread."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        drain_seconds: float,
        tls: tuple[str, str] | None = None,
        *,
        num_servers: int = 1,
        make_door: MakesDoor = SingleDoor,
    ):
        """
        Args:
            drain_seconds: a server ends in this time and GRACE_SECONDS after the first signal, and
                in GRACE_SECONDS after the second.
            tls: files of a certificate and its key.
            make_door: makes what answers the port.
        """
        self._sockets = sockets
        self._limits = (drain_seconds + GRACE_SECONDS, GRACE_SECONDS)
        self._poller = Poller()
        self._door = make_door(self._poller, sockets, self._retry_seconds, tls)
        self._terminal = Terminal()
        self._servers = [Server(index) for index in range(num_servers)]
        self._standby = Standby()
        self._signals = 0
        self._signalled_at = -SAME_SECONDS
        self._kill_at: float | None = None
        self._check_at = 0.0
        self._exit_code: int | None = None
        self._worst_code = 0
        self._remembered = Remembered()
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
        for number in HANDLED:
            signal.signal(number, _wake)
        self._poller.add(self._wakeup, self._on_wakeup)
        self._door.open()
        for server in self._servers:
            server.start_at = time.monotonic()
        while self._exit_code is None:
            now = time.monotonic()
            for server in self._servers:
                if server.start_at is not None and now >= server.start_at:
                    server.start_at = None
                    parent = self._start(server)
                    if parent is not None:
                        return parent
            if self._standby.is_due:
                parent = self._start_standby()
                if parent is not None:
                    return parent
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                self._kill()
            if now >= self._check_at:
                self._check_at = now + CHECK_SECONDS
                self._check()
            self._door.act()
            times = [self._kill_at, self._check_at, self._door.deadline]
            times += [server.start_at for server in self._servers]
            next_at = min((at for at in times if at is not None), default=None)
            self._poller.wait(None if next_at is None else next_at - time.monotonic())
        self._standby.kill()
        self._standby.await_killed()
        self._door.give_up()
        self._close()
        for listening in self._sockets:
            listening.close()
        return self._exit_code

    def _start(self, server: Server) -> Parent | None:
        """Let the standby be the server, or fork; returns a ``Parent`` in a new process."""
        restarts = server.restarts.count
        patience: int | None
        if (standby := self._standby.take_over(restarts, self._remembered.file)) is not None:
            pid, channel, patience = standby
        else:
            patience = None
            try:
                pid, channel = fork()
            except OSError as error:
                log.error("cannot start %s, will keep trying: %s", self._name(server), error)
                server.start_at = time.monotonic() + FORK_SECONDS
                return None
        if pid == 0:
            memory, count = self._remembered.content(), len(self._servers)
            self._close()
            replica = None if count == 1 else server.index
            return Parent(self._sockets, channel, restarts, replica, memory, num_replicas=count)
        server.began(pid, channel, patience)
        self._poller.add(channel, partial(self._on_message, server))
        self._door.began(server)
        return None

    def _start_standby(self) -> Parent | None:
        """Fork; returns a ``Parent`` in the new process."""
        self._standby.is_due = False
        try:
            pid, channel = fork()
        except OSError as error:
            log.warning("cannot start a standby: %s", error)
            return None
        if pid == 0:
            self._close()
            return Parent(self._sockets, channel, is_standby=True)
        self._standby.began(pid, channel)
        return None

    def _close(self) -> None:
        """Close what is the parent's alone."""
        signal.set_wakeup_fd(-1)
        self._wakeup.close()
        self._woken.close()
        self._door.drop()
        self._poller.close()
        for server in self._servers:
            server.ended()
        self._standby.ended()
        self._remembered.close()

    def _remember(self, server: Server, file: int) -> None:
        """Keep what a server serves by from now on, for those that will be started."""
        if self._remembered.file is not None and not server.accepts:
            return os.close(file)  # that one was started with it; another has read files since
        self._remembered.replace(file)

    # -- what the servers say --------------------------------------------------------------------

    def _on_message(self, server: Server) -> None:
        while server.channel is not None:
            try:
                message, files = receive(server.channel)
            except OSError:
                return
            if not message:  # it ends; SIGCHLD says how
                self._poller.remove(server.channel)
                return
            if message == REMEMBER:
                for file in files:  # none if this process has too many open files
                    self._remember(server, file)
                continue
            if message == ACCEPT:
                others = [one for one in self._servers if one is not server]
                for other in others:  # what they serve by may be in a message
                    self._on_message(other)
                server.accepted(self._remembered.file if others else None)
            elif message == STANDBY:
                self._standby.is_due = not self._signals
            else:
                server.heard(message)
            self._door.said(server, message, files)
            if message == ACCEPT and server.hung_up and server.pid is not None:
                os.kill(server.pid, signal.SIGHUP)

    def _reap(self) -> None:
        """Collect children that have ended, as process 1 strangers too; some stop, or go on."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            server = next((one for one in self._servers if one.pid == pid), None)
            if server is not None:
                server.is_stopped = os.WIFSTOPPED(status)
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                continue
            code = os.waitstatus_to_exitcode(status)
            self._standby.killed.discard(pid)
            if pid == self._standby.pid:
                self._standby.ended()
                if -code not in STOPS:  # Ctrl-C reaches all processes, this one maybe last
                    log.warning("the standby has ended %s", cause_of(code))
            if server is not None:
                self._ended(server, code)

    def _ended(self, server: Server, code: int) -> None:
        """A server has ended, with this code or by the signal of this number, negated."""
        self._on_message(server)  # its last words
        assert server.channel is not None
        self._poller.remove(server.channel)
        stood_by = server.stood_by
        server.ended()
        self._door.lost(server)
        self._standby.is_due = False  # the next server asks again
        if self._signals:
            asked = code in (-FORWARDED_STOP, *(-number for number in STOPS))
            self._leaves(0 if asked else exit_code(code))
        elif code == 0:
            self._leaves(0)  # somebody has stopped it
        elif stood_by:
            cause = cause_of(code, was_killed=server.was_killed)
            log.error("the standby has ended %s: starting a server without it", cause)
            server.start_at = time.monotonic()
        else:
            self._restart(server, code)

    def _leaves(self, code: int) -> None:
        """A server will not be started again; with the last one, all is over."""
        self._worst_code = self._worst_code or code
        if all(server.pid is None and server.start_at is None for server in self._servers):
            self._exit_code = self._worst_code

    def _restart(self, server: Server, code: int) -> None:
        name = self._name(server)
        cause = cause_of(code, was_killed=server.was_killed)
        again = server.was_killed or any(other.is_ready for other in self._servers)
        delay = server.restarts.delay(again=again)
        if delay is None:
            if server.restarts.count:
                log.error("%s has ended %s again and again: giving up", name, cause)
                self._leaves(exit_code(code))
                return
            if code < 0:
                log.error("%s has ended %s before it was ready", name, cause)
            self._exit_code = exit_code(code)  # the other servers would fail in the same way
            return
        when = f"in {delay:.0f} s" if delay else "now"
        log.error("%s has ended %s: starting it again %s", name, cause, when)
        server.start_at = time.monotonic() + delay

    def _name(self, server: Server) -> str:
        return "the server" if len(self._servers) == 1 else f"replica {server.index}"

    def _retry_seconds(self) -> float:
        starts = [server.start_at for server in self._servers if server.start_at is not None]
        return min(starts) - time.monotonic() if starts else 0.0

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
        for server in self._servers:
            server.hung_up = True
            if server.pid is not None and server.accepts:
                os.kill(server.pid, signal.SIGHUP)

    def _stop(self) -> None:
        now = time.monotonic()
        if now - self._signalled_at < SAME_SECONDS:
            return
        self._signalled_at = now
        self._signals += 1
        self._standby.kill()
        for server in self._servers:
            server.start_at = None
            if server.pid is not None:
                os.kill(server.pid, FORWARDED_STOP)
        if all(server.pid is None for server in self._servers):
            self._exit_code = 0
        seconds = self._limits[self._signals - 1] if self._signals <= len(self._limits) else 0.0
        kill_at = now + seconds + KILL_SECONDS
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)

    def _check(self) -> None:
        """Kill the children that make no progress; others take their places."""
        for server in self._servers:
            if server.pid is not None and (why := server.check()) is not None:
                log.error("%s %s: killing it", self._name(server), why)
                server.was_killed = True
                os.kill(server.pid, signal.SIGKILL)
        if (why := self._standby.check()) is not None:
            log.error("the standby %s: starting another one", why)
            self._standby.kill(is_due=not self._signals)

    def _kill(self) -> None:
        for server in self._servers:
            if server.pid is not None:
                log.error("%s does not end: killing it", self._name(server))
                os.kill(server.pid, signal.SIGKILL)


def _wake(number: int, frame: object) -> None:
    """Python writes the signal's number to the wake-up socket only if it has a handler."""
