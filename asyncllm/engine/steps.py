"""The steps that the executor has: submitted ahead, and taken back in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from asyncllm.engine.requests.history import History
from asyncllm.engine.scheduling.scheduler import Planned
from asyncllm.engine.stats import EngineStats
from asyncllm.executor.executor import Executor
from asyncllm.wire.messages import StepResult, decode_result, encode


class StepsInFlight:
    """A queue of at most ``limit`` steps.

    Args:
        landed: called on the loop when a step's result is there.

    Attributes:
        next_number: of the step to be planned next.
    """

    def __init__(
        self,
        executor: Executor,
        limit: int,
        landed: Callable[[], None],
        stats: EngineStats,
        history: History,
    ):
        self.next_number = 0
        self._executor = executor
        self._limit = limit
        self._landed = landed
        self._stats = stats
        self._history = history
        self._results: deque[asyncio.Future[bytes]] = deque()

    @property
    def has_room(self) -> bool:
        return len(self._results) < self._limit

    def submit(self, planned: Planned, now: float) -> None:
        """Give a step to the executor; never waits."""
        self.next_number += 1
        self._stats.step_submitted(planned.num_tokens, now, alone=not self._results)
        self._history.planned(planned, now)
        future = self._executor.submit(encode(planned.message))
        future.add_done_callback(lambda _: self._landed())
        self._results.append(future)

    def flush(self) -> None:
        """No step follows for now: have those in flight collected all the same."""
        if self._results:
            self._executor.flush()

    def take(self) -> StepResult | None:
        """The result of the oldest step, if it is there.

        Raises:
            EngineDead: the executor died before it had one.
        """
        if not self._results or not self._results[0].done():
            return None
        return decode_result(self._results.popleft().result())

    def count(self, result: StepResult, now: float) -> None:
        """Note what a step that was taken has cost."""
        self._stats.step_done(result, now, followed=bool(self._results))
        self._history.done(result.step, result.t_done - result.seconds, result.seconds)

    def forget(self) -> None:
        """Nobody waits for these steps any more, whatever becomes of them."""
        for future in self._results:
            future.add_done_callback(_retrieve)


def _retrieve(future: asyncio.Future[bytes]) -> None:
    """Look at its error, so that asyncio does not report that nobody has."""
    if not future.cancelled():
        future.exception()


__all__ = ["StepsInFlight"]
