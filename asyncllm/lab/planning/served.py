"""A simulated server: its device, and its event loop, which reads the requests."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.executor.sim.profile import HostTimes
from asyncllm.executor.sim.timeline import StepTiming
from asyncllm.lab.replay.simulate import Device


class StepCost(Protocol):
    """Step times; see ``asyncllm.executor.sim.cost.SimCost``."""

    def timing(
        self,
        step: int,
        starts: np.ndarray,
        lengths: np.ndarray,
        num_samples: int,
        decode_steps: int = 1,
    ) -> StepTiming: ...

    def copy_seconds(self, num_pages: int, page_size: int) -> float: ...


class Reading:
    """An event loop that reads one request after the other, over HTTP."""

    def __init__(self, host: HostTimes):
        self._host = host
        self._until = 0.0

    def enters(self, now: float, num_prompt: int) -> float:
        """When a request that is sent now enters the queue.

        The way back to the client is included, though it comes later, and so is what the event
        loop takes for the first token: no client can tell.
        """
        host = self._host
        reading = host.reading(num_prompt)
        self._until = max(now, self._until) + reading + host.begin
        return self._until + max(0.0, host.client - reading) + host.loop(1)


def device_of(cost: StepCost, limits: EngineLimits) -> Device:
    """A simulated device with these step times."""
    return Device(
        lambda step, rows: cost.timing(
            step, rows.starts, rows.lengths, rows.num_samples, rows.decode_steps
        ),
        lambda count: cost.copy_seconds(count, limits.page_size),
    )
