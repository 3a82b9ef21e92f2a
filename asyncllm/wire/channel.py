"""What the executor's worker needs of the way from and to the event loop."""

from __future__ import annotations

from typing import Final, Protocol

from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import StepResult

#: Tells the worker to collect the steps in flight: no further plan is about to come.
FLUSH: Final = b""
#: Tells the worker to capture one more graph.
CAPTURE: Final = b"capture"  # no plan: plans are msgpack arrays


class Channel(Protocol):
    """Plans in, results out."""

    @property
    def heartbeat(self) -> Heartbeat:
        """Where the worker says what it does."""

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next message: an encoded StepPlan, FLUSH or CAPTURE; None once the channel is closed.

        Raises:
            queue.Empty: none came within ``timeout`` seconds.
        """

    def launched(self) -> None:
        """The plan that was received last is on the device's queue: Python is not busy with it."""

    def post(self, result: StepResult) -> None:
        """Hand over the result of the oldest plan that has none yet."""


class LeaderChannel(Channel, Protocol):
    """The channel of rank 0: it ends at the event loop."""

    def wake(self) -> None:
        """Have ``receive`` return FLUSH, after what was sent before; from any thread."""
