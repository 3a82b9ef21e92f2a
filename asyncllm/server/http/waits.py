"""Waits: how long something waited, for the metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from aiohttp import web

from asyncllm.engine.stats import Distribution

if TYPE_CHECKING:
    from collections.abc import Callable

#: The longest wait is remembered for this long to twice as long.
RECENT_SECONDS: Final = 15.0


class Waits:
    """A distribution, and the longest recent wait, which a percentile over minutes hides."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.distribution = Distribution()
        self.last = 0.0
        self._clock = clock
        self._began = clock()
        self._longest = self._longest_before = 0.0

    def observe(self, seconds: float) -> None:
        self.distribution.observe(seconds)
        self.last = seconds
        self._turn_page()
        self._longest = max(self._longest, seconds)

    @property
    def longest(self) -> float:
        """The longest wait of the last RECENT_SECONDS, or of up to twice that."""
        self._turn_page()
        return max(self._longest, self._longest_before)

    def _turn_page(self) -> None:
        age = self._clock() - self._began
        if age < RECENT_SECONDS:
            return
        self._longest_before = self._longest if age < 2 * RECENT_SECONDS else 0.0
        self._longest = 0.0
        self._began += age


#: How long connections waited to be accepted.
ACCEPT_WAITS: Final = web.AppKey("asyncllm_accept_waits", Waits)
