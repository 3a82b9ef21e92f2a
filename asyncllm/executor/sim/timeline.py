"""When the steps and copies of one simulated device end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import numpy as np

from asyncllm.wire.messages import STATE_TO_DEVICE, STATE_TO_HOST, TO_DEVICE, TO_HOST


class Copies(msgspec.Struct, frozen=True):
    """The copies of one plan, int32 [k, 3], in flight until ``ends``.

    ``seconds`` is the time spent copying, summed over both directions.
    """

    step: int
    pages: np.ndarray
    seconds: float
    ends: float


class StepTiming(NamedTuple):
    """Seconds of a step, see ``profile.Kind`` and ``profile.HostTimes``.

    Attributes:
        seconds: on the device; None for a step without rows.
        gap: the least time between the step before and this one.
        idle: beyond these, if the device has nothing else to do.
        loop: of the event loop, for its launch and its result.
    """

    seconds: float | None
    gap: float = 0.0
    idle: float = 0.0
    loop: float = 0.0


NO_ROWS: Final = StepTiming(None)


class StepTimes(NamedTuple):
    """When a step begins and is done on the device, and when the event loop takes its result."""

    begins: float
    done: float
    reported: float


class Timeline:
    """Steps run one after the other; copies run beside them, one after the other per direction.

    Args:
        copy_seconds: the time to copy a number of pages in one direction.
    """

    def __init__(self, copy_seconds: Callable[[int], float]):
        self._copy_seconds = copy_seconds
        self._copies: list[Copies] = []
        self._device_free = 0.0
        self._stream_free = {TO_HOST: 0.0, TO_DEVICE: 0.0}
        self._last_done = 0.0
        self._loop_free = 0.0  # when the event loop is done with the results so far

    def start_copies(self, step: int, pages: np.ndarray, now: float) -> None:
        """Start the copies of a plan; they wait for earlier ones, and for no step."""
        total, ends = 0.0, now
        for direction, of_states in ((TO_HOST, STATE_TO_HOST), (TO_DEVICE, STATE_TO_DEVICE)):
            count = int(np.isin(pages[:, 0], (direction, of_states)).sum())
            seconds = self._copy_seconds(count)
            if count:
                starts = max(now, self._stream_free[direction])
                self._stream_free[direction] = starts + seconds
                ends = max(ends, starts + seconds)
            total += seconds
        self._copies.append(Copies(step, pages, total, ends))

    def start_step(self, timing: StepTiming, now: float, *, alone: bool) -> StepTimes:
        """Start a step; one without rows ends with all copies.

        Args:
            alone: no other step is in flight.
        """
        if timing.seconds is None:
            begins = done = max((copies.ends for copies in self._copies), default=now)
        else:
            ready = now + timing.idle if alone else now
            begins = max(ready, self._device_free + timing.gap)
            done = self._device_free = begins + timing.seconds
        self._last_done = done = max(done, self._last_done)  # results come in order
        # The loop takes a result when it is done with the one before.
        reported = max(done, self._loop_free)
        self._loop_free = reported + timing.loop
        return StepTimes(begins, done, reported)

    def finish_copies(self, step: int, done: float) -> list[Copies]:
        """Remove and return the copies that the result of a step, done at that time, reports."""
        ended = [c for c in self._copies if c.step <= step and c.ends <= done]
        self._copies = [c for c in self._copies if c not in ended]
        return ended
