"""Cancels: how long the slots and pages of aborted requests were still in use."""

from __future__ import annotations

from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.stats import Histogram


class Cancels:
    """Aborted sequences until they have given up everything; times by the engine's clock.

    A step in flight may have a row of a sequence, which then keeps its slot and its pages until
    that step has ended.
    """

    def __init__(self, seconds: Histogram):
        """
        Args:
            seconds: observes the time from each abort to the end of its use.
        """
        self._seconds = seconds
        self._waiting: list[tuple[Sequence, float]] = []

    def add(self, seq: Sequence, now: float) -> None:
        """``seq`` was aborted, and the scheduler has ended it."""
        self._waiting.append((seq, now))
        self.look(now)

    def look(self, now: float) -> None:
        """A step may have ended."""
        if not self._waiting:
            return
        still = []
        for seq, since in self._waiting:
            if seq.slot < 0 and seq.node is None:
                self._seconds.observe(now - since)
            else:
                still.append((seq, since))
        self._waiting = still
