"""The steps of a trace, with their shapes and measured times."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from asyncllm.executor.sim.profile import GOLDEN

#: The most steps that a ``Sample`` keeps.
KEPT: Final = 20_000


class RecordedStep(NamedTuple):
    """A step of a trace.

    Attributes:
        starts, lengths: int64 [n]; tokens already cached, and new ones, of each row.
        num_samples: rows that sample.
        decode_steps: tokens that it yields of each row.
        planned: time of the plan; ``alone``: no other step was in flight then.
        before, reported: times of the result before, and of its own, on the event loop.
        seconds: on the device.
    """

    starts: np.ndarray
    lengths: np.ndarray
    num_samples: int
    decode_steps: int
    planned: float
    alone: bool
    before: float = 0.0
    reported: float = 0.0
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """Between the step before and this one, in seconds, if results are taken at once."""
        return self.reported - self.before - self.seconds


class Sample:
    """Steps of a trace, evenly spread over it, and over steps that take turns."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, RecordedStep]] = []
        self._seen = 0
        self._share = 1.0

    @property
    def steps(self) -> list[RecordedStep]:
        return [step for _, step in self._kept]

    def add(self, step: RecordedStep) -> None:
        self._seen += 1
        draw = self._seen * GOLDEN % 1.0
        if draw < self._share:
            self._kept.append((draw, step))
        if len(self._kept) > KEPT:
            self._share /= 2
            self._kept = [kept for kept in self._kept if kept[0] < self._share]
