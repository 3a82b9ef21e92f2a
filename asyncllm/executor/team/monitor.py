"""Watches the peers: a death or a stop is known within a second."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from asyncllm.executor.team.process import PeerProcess

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
