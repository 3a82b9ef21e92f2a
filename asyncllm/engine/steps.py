"""The steps that the executor has: submitted ahead, and taken back in order."""

from __future__ import annotations

from asyncllm.engine.requests.history import History
from asyncllm.engine.scheduling.step import Planned
from asyncllm.engine.stats import EngineStats
from asyncllm.wire.executor import Executor, ResultHandler
from asyncllm.wire.messages import StepResult, decode_result, encode


class StepsInFlight:
    """At most ``limit`` steps, counted and timed.

    Args:
        on_result: called on the loop with the outcome of each step, the oldest first.

    Attributes:
        next_number: of the step to be planned next.
    """

    def __init__(
        self,
        executor: Executor,
        limit: int,
        on_result: ResultHandler,
        stats: EngineStats,
        history: History,
    ):
        self.next_number = 0
        self._executor = executor
        self._heartbeat = executor.heartbeat
        self._limit = limit
        self._on_result = on_result
        self._stats = stats
        self._history = history
        self._num_in_flight = 0

    @property
    def has_room(self) -> bool:
        return self._num_in_flight < self._limit

    def submit(self, planned: Planned, now: float) -> None:
        """Give a step to the executor, which may wait until it is launched."""
        self.next_number += 1
        self._stats.step_submitted(planned.num_tokens, now, alone=not self._num_in_flight)
        self._history.planned(planned, now)
        self._num_in_flight += 1
        self._heartbeat.submitted(planned.message.step)
        self._executor.submit(encode(planned.message), self._on_result)

    @property
    def idle(self) -> bool:
        return not self._num_in_flight

    def flush(self) -> None:
        """No step follows for now: have those in flight collected all the same."""
        if self._num_in_flight:
            self._executor.flush()

    def take(self, message: bytes, now: float) -> StepResult:
        """The result of the oldest step, which the executor has given back."""
        result = decode_result(message)
        self._num_in_flight -= 1
        self._heartbeat.finished()
        self._stats.step_done(result, now, followed=bool(self._num_in_flight))
        self._history.done(result)
        return result
