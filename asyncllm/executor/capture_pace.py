"""When graphs are captured that serving did not have to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty
from typing import Final

from asyncllm.wire.channel import CAPTURE, FLUSH, Channel
from asyncllm.wire.messages import StepResult

#: Without a plan for this long, the engine is idle.
IDLE_SECONDS: Final = 0.01
#: Beside streams, something is captured this often. A capture holds up all streams for 20 to 40 ms,
#: so fewer than one in a hundred of their tokens may be late: at most 250 tokens come meanwhile.
BUSY_SECONDS: Final = 4.0


class CapturePace:
    """A ``Channel`` that also gives CAPTURE: when the engine is idle, and at times behind a plan.

    Args:
        missing: whether something is left to capture.
    """

    def __init__(self, channel: Channel, missing: Callable[[], bool]):
        self.heartbeat = channel.heartbeat
        self._channel = channel
        self._missing = missing
        self._in_flight = 0
        self._behind_plan = False
        self._last = time.perf_counter()

    def receive(self, timeout: float | None = None) -> bytes | None:
        if self._missing():
            if self._behind_plan and time.perf_counter() - self._last > BUSY_SECONDS:
                return self._capture()
            if self._in_flight == 0:
                timeout = IDLE_SECONDS
        try:
            message = self._channel.receive(timeout)
        except Empty:
            return self._capture()
        self._behind_plan = message is not None and message != FLUSH
        self._in_flight += self._behind_plan
        return message

    def launched(self) -> None:
        self._channel.launched()

    def post(self, result: StepResult) -> None:
        self._in_flight -= 1
        self._channel.post(result)

    def _capture(self) -> bytes:
        self._behind_plan = False
        self._last = time.perf_counter()
        return CAPTURE
