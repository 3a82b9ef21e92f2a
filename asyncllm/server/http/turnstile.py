"""Turnstile: how many requests begin in one turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from asyncllm.server.http.traffic import Waits

#: Starting requests may always take this long in one turn of the loop.
LEAST_SECONDS: Final = 0.005
#: They may take as long as everything else in the turn did, but at most this.
MOST_SECONDS: Final = 0.05
#: First estimate of the time to parse, render, tokenize and queue a request.
START_SECONDS: Final = 0.0005
#: Parsing and checking so many bytes of a body takes about as long as a start.
BYTES_PER_START: Final = 16 * 1024
#: Weight of the latest turn in the estimate.
WEIGHT: Final = 0.25


class Turnstile:
    """Lets requests begin in order of arrival, a few per turn of the loop.

    Without it, a thousand arrivals at once would take one turn of half a second, in which no step
    is planned, no token delivered and no health check answered.
    """

    def __init__(self, waits: Waits, clock: Callable[[], float] = time.perf_counter):
        """``waits``: observes the seconds for which each request waited here."""
        self._waits = waits
        self._clock = clock
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._cost = START_SECONDS
        self._left = self._allowed(0.0)
        self._started = 0
        self._is_turning = False
        self._turned_at = self._began_at = 0.0

    async def enter(self, num_bytes: int = 0) -> None:
        """Wait for the request's turn.

        Args:
            num_bytes: size of its body; a large one counts as several starts.
        """
        weight = 1 + num_bytes // BYTES_PER_START
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            self._left, self._started = self._allowed(0.0), 0
            self._turned_at = self._began_at = self._clock()
            loop.call_soon(self._turn)
        if self._left > 0 and not self._waiting:
            self._left -= weight
            self._waits.observe(0.0)
            return
        turn = loop.create_future()
        self._waiting.append((turn, weight))
        began = self._clock()
        await turn
        self._waits.observe(self._clock() - began)

    def _turn(self) -> None:
        """Let the next ones in: they run in the next turn, right before this is called again."""
        now = self._clock()
        starting = now - self._began_at
        if self._started:
            self._cost += WEIGHT * (starting / self._started - self._cost)
        others = now - self._turned_at - starting
        self._turned_at = now
        if not self._waiting:
            self._is_turning = False
            return
        loop = asyncio.get_running_loop()
        loop.call_soon(self._begin)
        self._started, self._left = 0, self._allowed(others)
        while self._waiting and self._left > 0:
            turn, weight = self._waiting.popleft()
            if not turn.done():  # cancelled: its client is gone
                turn.set_result(None)
                self._started += weight
                self._left -= weight
        loop.call_soon(self._turn)

    def _begin(self) -> None:
        self._began_at = self._clock()

    def _allowed(self, others: float) -> int:
        """How many requests may begin in a turn, if everything else in it takes ``others`` s."""
        seconds = min(max(LEAST_SECONDS, others), MOST_SECONDS)
        return max(1, round(seconds / self._cost))
