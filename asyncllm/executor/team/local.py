"""Ranks that are processes of this machine, started and watched by this process."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from asyncllm.executor.team.peer import PeerSettings, TeamSettings
from asyncllm.executor.team.process import PeerProcess, close_peers
from asyncllm.executor.team.reports import Report, ReportLine
from asyncllm.wire.heartbeat import Peer
from asyncllm.wire.ring import RingClosed, RingWriter

logger = logging.getLogger(__name__)

#: Between two looks at whether a peer is stopped.
LOOK_SECONDS = 0.25
#: A peer that is stopped for this long is lost.
STOPPED_SECONDS = 0.5


class Monitor:
    """One thread for all peers; it sleeps in poll, and looks at /proc four times a second."""

    def __init__(self, peers: Sequence[PeerProcess], on_lost: Callable[[int, str], None]):
        """Begin to watch.

        Args:
            on_lost: called in the monitor's thread, once at most for a peer: with its rank, and
                what to tell people: how it ended and what it did last. Peers that are being closed
                are not lost.
        """
        self._on_lost = on_lost
        self._wake = os.eventfd(0)
        # Copies, since closing a peer closes its own.
        self._watched = {os.dup(peer.pidfd): peer for peer in peers}
        self._stopped_since: dict[int, float] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="asyncllm-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more. ``on_lost`` may call it; elsewhere it waits for a call that runs."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._wake, *self._watched):
            poll.register(fd, select.POLLIN)
        while not self._closing:
            for fd, _ in poll.poll(LOOK_SECONDS * 1000 if self._watched else None):
                if fd in self._watched:
                    self._lose(fd, poll, self._watched[fd].end())
            for fd, peer in list(self._watched.items()):
                if self._is_long_stopped(fd, peer):
                    self._lose(fd, poll, f"has been stopped for {STOPPED_SECONDS:g} s")
        with self._lock:  # close may not have woken us yet
            for fd in (self._wake, *self._watched):
                os.close(fd)

    def _is_long_stopped(self, fd: int, peer: PeerProcess) -> bool:
        if not peer.is_stopped():
            self._stopped_since.pop(fd, None)
            return False
        now = time.monotonic()
        return now - self._stopped_since.setdefault(fd, now) >= STOPPED_SECONDS

    def _lose(self, fd: int, poll: select.poll, how: str) -> None:
        """Report a peer, and watch it no more."""
        peer = self._watched.pop(fd)
        poll.unregister(fd)
        os.close(fd)
        if peer.closing or self._closing:
            return
        who = f"rank {peer.rank} (process {peer.pid}) {how}"
        try:
            self._on_lost(peer.rank, f"{who}; {peer.last_operation()}")
        except Exception:
            logger.exception("reporting a lost peer failed: %s", who)


#: How long ranks may take to end once they are told to, before they are killed.
CLOSE_SECONDS: Final = 10.0

_MODULE: Final = "asyncllm.executor.team.peer"


class MachineRanks(Protocol):
    """Ranks on one machine, as rank 0 has them.

    Attributes:
        ranks: consecutive.
    """

    ranks: range

    @property
    def peers(self) -> Sequence[Peer]:
        """The processes of the ranks, in their order."""

    def watch(self, on_lost: Callable[[int, str], None]) -> None:
        """Begin to watch them.

        Args:
            on_lost: called in another thread when a rank is lost: with its rank, and what to tell
                people: how it ended and what it did last. Ranks that are being closed are not lost.
        """

    def send(self, message: bytes) -> None:
        """Have all of them receive a message; ignored once one is lost."""

    def end(self) -> None:
        """Have them end once they have received what was sent. May be called again."""

    def receive(self, rank: int) -> Report | None:
        """The next report of a rank; waits for it. None once the rank has ended, or is lost."""

    def last_words(self, rank: int) -> str | None:
        """Why a rank has ended, if it has said so; does not wait."""

    def kill(self) -> None:
        """End them at once, from any thread; ``receive`` returns None then."""

    def expect_end(self) -> None:
        """From now on, a rank that ends is not lost."""

    def close(self, timeout: float) -> None:
        """End all, and leave nothing behind. May be called again.

        Args:
            timeout: how long they may take to end by themselves, in seconds.
        """


class LocalRanks:
    """``MachineRanks`` of this machine. Made in a thread that must outlive them.

    Args:
        ranks: one at least.
        settings: for all of them.
    """

    def __init__(self, ranks: range, settings: TeamSettings):
        self.ranks = ranks
        self._ring = RingWriter(len(ranks))
        self._lines: dict[int, ReportLine] = {}
        self._peers: list[PeerProcess] = []
        self._monitor: Monitor | None = None
        try:
            for rank in ranks:
                self._start(rank, settings)
        except BaseException:
            self.close(0.0)
            raise

    @property
    def peers(self) -> Sequence[PeerProcess]:
        return self._peers

    def watch(self, on_lost: Callable[[int, str], None]) -> None:
        self._monitor = Monitor(self._peers, on_lost)

    def _start(self, rank: int, settings: TeamSettings) -> None:
        self._lines[rank], other = ReportLine.pair()
        with other:
            ring = self._ring.fds_of(rank - self.ranks.start)
            fds = [*ring, other.fileno()]
            if isinstance(settings.store, int):
                fds.append(settings.store)
            each = PeerSettings(settings, rank, ring, other.fileno())
            self._peers.append(PeerProcess(rank, _MODULE, each, fds))

    def send(self, message: bytes) -> None:
        with suppress(RingClosed):
            self._ring.send(message)

    def end(self) -> None:
        self._ring.close()

    def receive(self, rank: int) -> Report | None:
        return self._lines[rank].receive()

    def last_words(self, rank: int) -> str | None:
        return self._lines[rank].last_words()

    def kill(self) -> None:
        for peer in self._peers:
            peer.kill()  # a stopped one would hold up a collective
        for line in self._lines.values():
            line.cut()
        self._ring.close()

    def expect_end(self) -> None:
        for peer in self._peers:
            peer.closing = True

    def finish(self, timeout: float) -> None:
        """``close``, except that reports can still be received. May be called again."""
        self.expect_end()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self._ring.close()
        close_peers(self._peers, timeout)

    def close(self, timeout: float) -> None:
        self.finish(timeout)
        for line in self._lines.values():
            line.close()
