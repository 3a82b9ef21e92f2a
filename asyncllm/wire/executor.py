"""What the engine needs of an executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from asyncllm.config import EngineLimits
from asyncllm.errors import EngineDead
from asyncllm.wire.heartbeat import Heartbeat

#: Takes a step's encoded StepResult, or the error that the executor died with before it had one.
ResultHandler: TypeAlias = Callable[[bytes | EngineDead], None]


class Executor(Protocol):
    """Runs encoded StepPlans in order.

    Attributes:
        heartbeat: says what it does; steps are entered by whoever submits them.
    """

    heartbeat: Heartbeat

    async def start(self) -> EngineLimits:
        """Load the model. Errors of loading are raised here.

        When cancelled, it returns once loading has ended; the caller has to end that.
        """

    def on_death(self, tell: Callable[[str], None]) -> None:
        """Set who is told why it has died, on the loop, even if no step is in flight."""

    def submit(self, plan: bytes, on_result: ResultHandler) -> None:
        """Run a plan; waits for its launch at most. ``on_result`` is called once, later, on the
        event loop."""

    def flush(self) -> None:
        """Have the steps in flight collected without waiting for a plan behind them."""

    def abandon(self) -> None:
        """The step in flight will never end: ``close`` does not wait for it."""

    async def close(self) -> None:
        """Finish what is in flight and give the device's memory back."""
