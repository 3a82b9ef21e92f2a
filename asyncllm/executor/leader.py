"""The worker of rank 0 when there is no other rank."""

from __future__ import annotations

from asyncllm.config import EngineLimits
from asyncllm.executor.capture_pace import CapturePace
from asyncllm.executor.worker import Worker
from asyncllm.wire.channel import Channel


class Leader:
    """Runs a worker, and decides when it captures."""

    def __init__(self, worker: Worker):
        self._worker = worker

    @property
    def limits(self) -> EngineLimits:
        return self._worker.limits

    def run(self, channel: Channel) -> None:
        """As ``Worker.run``."""
        self._worker.run(CapturePace(channel, lambda: self._worker.has_captures))
