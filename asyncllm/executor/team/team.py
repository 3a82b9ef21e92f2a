"""Rank 0's side of a tensor-parallel team: its peers, and what goes to and comes from them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import torch

from asyncllm.config import EngineConfig
from asyncllm.errors import EngineDead
from asyncllm.executor.team.monitor import Monitor
from asyncllm.executor.team.peer import PeerSettings
from asyncllm.executor.team.process import PeerProcess, close_peers
from asyncllm.executor.team.reports import Done, Failed, Joining, Ready, Report, ReportLine
from asyncllm.parallel.group import GroupRanks, join, open_store
from asyncllm.parallel.ranks import RanksDisagree
from asyncllm.wire.ring import RingClosed, RingWriter

R = TypeVar("R", bound=Report)

log = logging.getLogger(__name__)

#: How long peers may take to end once they are told to, before they are killed.
CLOSE_SECONDS: Final = 10.0
#: A lost peer is noticed in many ways; the monitor, which knows why, may be a moment later.
REASON_SECONDS: Final = 2.0


class RankLost(EngineDead):
    """A peer is lost; the message says which, how it ended, and what it did last."""


class Team:
    """The peers of rank 0. Made and used in the executor thread, which must outlive them.

    Args:
        config: for all ranks; ``tp`` is their number.
        folder: of the model.

    Raises:
        RankLost: from any method, when a peer is lost.
    """

    def __init__(self, config: EngineConfig, folder: Path):
        self._size = config.tp
        self._ranks: GroupRanks | None = None
        self._loss: str | None = None
        self._lost = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._ring = RingWriter(self._size - 1)
        self._store = os.memfd_create("asyncllm-ranks")
        self._lines: list[ReportLine] = []
        self._peers: list[PeerProcess] = []
        self._monitor: Monitor | None = None
        try:
            for rank in range(1, self._size):
                self._start(rank, config, folder)
            self._monitor = Monitor(self._peers, self._on_lost)
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, rank: int, config: EngineConfig, folder: Path) -> None:
        line, other = ReportLine.pair()
        self._lines.append(line)
        with other:
            ring = self._ring.fds_of(rank - 1)
            settings = PeerSettings(
                config,
                str(folder),
                rank,
                ring,
                other.fileno(),
                self._store,
                log.getEffectiveLevel(),
            )
            fds = (*ring, other.fileno(), self._store)
            module = "asyncllm.executor.team.peer"
            self._peers.append(PeerProcess(rank, module, settings, fds))

    @property
    def peers(self) -> Sequence[PeerProcess]:
        return self._peers

    def join(self, device: torch.device) -> GroupRanks:
        """Wait until all peers have started, and join them."""
        for rank in range(1, self._size):
            self._report(rank, Joining)
        self._ranks = join(open_store(self._store, self._size), 0, self._size, device)
        self._check()
        return self._ranks

    def await_ready(self) -> None:
        """Wait until all peers have their share of the model."""
        for rank in range(1, self._size):
            self._report(rank, Ready)

    def on_loss(self, wake: Callable[[], None]) -> None:
        """Set what is called, in another thread, when a peer is lost."""
        self._wake = wake

    def send(self, message: bytes) -> None:
        """Have all peers receive a message."""
        self._check()
        with suppress(RingClosed):
            self._ring.send(message)
        self._check()

    def end(self) -> None:
        """Have all peers end once they have received what was sent."""
        self._ring.close()

    def done(self, step: int) -> list[Done]:
        """Wait until all peers are done with a step; their reports, in any order of ranks."""
        reports = [self._report(rank, Done) for rank in range(1, self._size)]
        assert all(report.step == step for report in reports), "peers report steps in order"
        return reports

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End all peers, and leave nothing behind. May be called again."""
        for peer in self._peers:
            peer.closing = True
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self._ring.close()
        close_peers(self._peers, timeout)
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        for line in self._lines:
            line.close()
        self._lines.clear()
        if self._store >= 0:
            os.close(self._store)
            self._store = -1

    def explain(self, error: Exception) -> Exception:
        """The cause of an error that a lost peer may have led to."""
        if isinstance(error, RankLost):
            return error
        if isinstance(error, RanksDisagree):
            return RankLost(str(error))
        self._lost.wait(REASON_SECONDS)
        return RankLost(self._loss or str(error))

    def _report(self, rank: int, kind: type[R]) -> R:
        """The next report of a peer, which is of that kind unless the peer ends."""
        report = self._lines[rank - 1].receive()
        if isinstance(report, kind):
            return report
        if isinstance(report, Failed):
            raise RankLost(f"rank {rank}: {report.error}")
        self._lost.wait(REASON_SECONDS)
        self._check()
        raise RankLost(f"rank {rank} has ended")

    def _check(self) -> None:
        if self._loss is not None:
            raise RankLost(self._loss)

    def _on_lost(self, rank: int, reason: str) -> None:
        """In the monitor's thread: get the executor thread out of whatever it waits for."""
        if self._loss is not None:  # which was the end of the others, too
            return
        words = self._lines[rank - 1].last_words()
        self._loss = reason if words is None else f"{reason}: {words}"
        self._lost.set()
        log.error("%s", self._loss)
        for peer, line in zip(self._peers, self._lines, strict=True):
            peer.kill()  # a stopped one would hold up a collective
            line.cut()
        self._ring.close()
        self._wake()
        if self._ranks is not None:
            self._ranks.abort()
