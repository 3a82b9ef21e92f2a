"""Bucket: how much of something that is limited per minute may be used now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: Less than this is an error of rounding.
_NOTHING: Final = 1e-6


class Bucket:
    """It refills evenly, and holds at most what one minute brings.

    So in any time t, at most ``limit * (1 + t / 60)`` is taken and not given back, besides debts:
    it may fall below zero, and then nothing can be taken until that has refilled.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self.limit = per_minute
        self._per_second = per_minute / 60
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def level(self) -> float:
        """What is in it now; below zero, what is owed."""
        now = self._clock()
        refilled = self._level + (now - self._filled_at) * self._per_second
        self._level, self._filled_at = min(refilled, self.limit), now
        return self._level

    @property
    def seconds_to_full(self) -> float:
        return (self.limit - self.level) / self._per_second

    def wait(self, amount: float) -> float:
        """Seconds until ``amount`` can be taken. A full bucket is enough for any amount."""
        missing = min(amount, self.limit) - self.level
        return missing / self._per_second if missing > _NOTHING else 0.0

    def take(self, amount: float) -> None:
        """Whether there is enough is for the caller to ask; the rest is a debt."""
        self._level = self.level - amount

    def give_back(self, amount: float) -> None:
        """Return what was taken and not used; less than zero takes more."""
        self._level = min(self.level + amount, self.limit)
