"""What an application knows of its connections and requests: for limits, and for the metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from asyncllm.engine.stats import Distribution
from asyncllm.errors import AsyncLLMError
from asyncllm.server.http.errors import Refusals
from asyncllm.server.http.slow_clients import SlowClients
from asyncllm.supervise.crowd import Crowd

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


class Unanswered:
    """Requests whose handlers run; all of them can be ended.

    Attributes:
        ended_by: what they were ended with; None until then.
    """

    def __init__(self) -> None:
        self.ended_by: AsyncLLMError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @contextmanager
    def until_answered(self) -> Iterator[None]:
        """Around the handler of a request, in its task."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.ended_by is not None:
                task.uncancel()  # it goes on, to write an answer
            raise
        finally:
            self._tasks.discard(task)

    def end(self, error: AsyncLLMError) -> None:
        """Have each of them end with this error; an answer that has begun breaks off."""
        self.ended_by = error
        for task in self._tasks:
            task.cancel()


@dataclass
class Traffic:
    """One per application.

    Attributes:
        crowd: the connections of the port, if the application has one of its own.
        accept_waits: how long connections waited to be accepted.
    """

    crowd: Crowd = field(default_factory=Crowd)
    accept_waits: Waits = field(default_factory=Waits)
    slow_clients: SlowClients = field(default_factory=SlowClients)
    refusals: Refusals = field(default_factory=Refusals)
    unanswered: Unanswered = field(default_factory=Unanswered)


#: A host application has none.
TRAFFIC: Final = web.AppKey("asyncllm_traffic", Traffic)
