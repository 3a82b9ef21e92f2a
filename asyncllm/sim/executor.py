"""An executor without a model: it checks every plan, waits as long as a device would, and samples.

It lives on the event loop. On a virtual clock (``asyncllm.sim.virtual_time``) an hour of load takes
seconds, and the same requests at the same times give the same steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import EngineDead
from asyncllm.executor.memory.memory import resolve_limits
from asyncllm.models.spec import ModelSpec
from asyncllm.sim.cost import H200, StepCost, shape_of
from asyncllm.sim.device import Computed, SimDevice
from asyncllm.sim.pages import BrokenPlan
from asyncllm.wire.executor import ResultHandler
from asyncllm.wire.messages import (
    TO_DEVICE,
    TO_HOST,
    StepPlan,
    StepResult,
    decode_plan,
    encode,
    unpack,
)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way; all but the copies it will report is known from the start."""

    number: int
    computed: Computed
    t_launch: float
    t_done: float
    seconds: float
    on_result: ResultHandler
    timer: asyncio.TimerHandle


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies of one plan, under way until ``ends``; ``seconds`` of copying, both directions."""

    step: int
    pages: np.ndarray
    seconds: float
    ends: float


class SimExecutor:
    """``Executor`` with the step times of ``cost``.

    Steps run one after the other, copies beside them, those of one direction one after the other.
    A plan that would corrupt somebody's KV ends the executor, as it would end in garbage elsewhere.

    Args:
        clock: seconds, at the pace of the running loop's timers; by default the loop's own time.
    """

    def __init__(
        self, limits: EngineLimits, cost: StepCost, *, clock: Callable[[], float] | None = None
    ):
        self.limits = limits
        self._cost = cost
        self._clock = clock or asyncio.get_running_loop().time
        self._device = SimDevice(limits)
        self._steps: deque[_Step] = deque()
        self._copies: list[_Copies] = []
        self._device_free = 0.0
        self._stream_free = {TO_HOST: 0.0, TO_DEVICE: 0.0}
        self._last_done = 0.0
        self._dead: EngineDead | None = None

    async def start(self) -> EngineLimits:
        """There is nothing to load."""
        return self.limits

    def submit(self, plan: bytes, on_result: ResultHandler) -> None:
        decoded = decode_plan(plan)
        now = self._clock()
        if self._dead is None:
            try:
                self._begin(decoded, on_result, now)
            except BrokenPlan as error:
                self._die(f"the simulated device refuses step {decoded.step}: {error}")
        if self._dead is not None:
            asyncio.get_running_loop().call_soon(on_result, self._dead)

    def flush(self) -> None:
        """Results are never held back."""

    async def close(self) -> None:
        """Drop what is in flight: nothing of it is real."""
        self._die("engine closed")

    def _begin(self, plan: StepPlan, on_result: ResultHandler, now: float) -> None:
        computed = self._device.take(plan)
        if plan.copies:
            self._copies.append(self._begin_copies(plan.step, unpack(plan.copies, 3), now))
        seconds = 0.0
        if len(computed.rows.slots):
            seconds = self._seconds(computed, plan.decode_steps)
            done = self._device_free = max(now, self._device_free) + seconds
        else:
            # It takes none of the device's time.
            done = max((copies.ends for copies in self._copies), default=now)
        done = self._last_done = max(done, self._last_done)  # results come in order
        timer = asyncio.get_running_loop().call_later(max(done - now, 0.0), self._report)
        self._steps.append(_Step(plan.step, computed, now, done, seconds, on_result, timer))

    def _seconds(self, computed: Computed, decode_steps: int) -> float:
        slots, starts, ends = computed.rows
        if decode_steps == 1:
            return self._cost.seconds(starts, ends - starts, computed.num_samples)
        ones = np.ones_like(slots)
        rounds = [
            self._cost.seconds(starts + after, ones, len(slots)) for after in range(decode_steps)
        ]
        return sum(rounds)

    def _begin_copies(self, step: int, pages: np.ndarray, now: float) -> _Copies:
        total, ends = 0.0, now
        for direction in (TO_HOST, TO_DEVICE):
            count = int((pages[:, 0] == direction).sum())
            seconds = self._cost.copy_seconds(count, self.limits.page_size)
            if count:
                begins = max(now, self._stream_free[direction])
                self._stream_free[direction] = begins + seconds
                ends = max(ends, begins + seconds)
            total += seconds
        return _Copies(step, pages, total, ends)

    def _report(self) -> None:
        """The oldest step's time has come."""
        step = self._steps.popleft()
        landed = [
            copies
            for copies in self._copies
            if copies.step <= step.number and copies.ends <= step.t_done
        ]
        if landed:
            self._copies = [copies for copies in self._copies if copies not in landed]
        self._device.report([copies.pages for copies in landed])
        result = StepResult(
            step=step.number,
            tokens=step.computed.tokens,
            logprobs=step.computed.logprobs,
            prompts=step.computed.prompts,
            pooled=step.computed.pooled,
            error=None,
            t_launch=step.t_launch,
            t_done=step.t_done,
            copied=tuple((copies.step, copies.seconds) for copies in landed),
            seconds=step.seconds,
        )
        step.on_result(encode(result))

    def _die(self, cause: str) -> None:
        self._dead = self._dead or EngineDead(cause)
        while self._steps:
            step = self._steps.popleft()
            step.timer.cancel()
            asyncio.get_running_loop().call_soon(step.on_result, self._dead)


def build_sim(
    config: EngineConfig, spec: ModelSpec, clock: Callable[[], float] | None = None
) -> SimExecutor:
    """The executor of ``device="sim"``: an H200 with the shape that ``sim_profile`` names.

    Raises:
        ModelError: the model, or the cache asked for, does not fit that GPU.
    """
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    shape = shape_of(config.sim_profile, spec)
    cost = StepCost.of(shape, H200, itemsize=4 if dtype == "float32" else 2)
    limits = resolve_limits(
        config,
        # The text is the model's own, the rest the profile's.
        msgspec.structs.replace(spec, max_position_embeddings=shape.context_length),
        device="sim",
        dtype=dtype,
        cache_bytes=int(config.gpu_memory_utilization * H200.memory) - cost.weight_bytes,
        host_bytes=int(H200.host_memory),
        bytes_per_token=cost.kv_bytes,
    )
    return SimExecutor(limits, cost, clock=clock)
