"""An executor without a model: it checks every plan, waits as long as a device would, and samples.

It runs on the event loop. On a virtual clock (``virtual_time``) an hour of load takes
seconds, and equal requests at equal times give equal steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from asyncllm.config import EngineConfig, EngineLimits, synthetic_rate
from asyncllm.errors import EngineDead
from asyncllm.executor.memory.limits import resolve_limits
from asyncllm.executor.sim import virtual_time
from asyncllm.executor.sim.cost import H200, SimCost
from asyncllm.executor.sim.device import Computed, SimDevice
from asyncllm.executor.sim.pages import BrokenPlan
from asyncllm.executor.sim.profile import HostTimes, find_profile
from asyncllm.executor.sim.shape import shape_of
from asyncllm.executor.sim.timeline import NO_ROWS, StepTiming, Timeline
from asyncllm.models.spec import ModelSpec
from asyncllm.wire.executor import ResultHandler
from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import StepPlan, StepResult, decode_plan, encode, unpack


class _Step(msgspec.Struct, frozen=True):
    """A step in flight."""

    number: int
    computed: Computed
    t_launch: float
    t_done: float
    seconds: float
    on_result: ResultHandler
    timer: asyncio.TimerHandle


class SimExecutor:
    """``Executor`` with the step times of ``cost``.

    A plan that would corrupt KV ends the executor.

    Args:
        clock: seconds at the pace of the running loop's timers; by default the loop's time.
        synthetic_rate: see ``SimDrafts``.
    """

    def __init__(
        self,
        limits: EngineLimits,
        cost: SimCost,
        *,
        clock: Callable[[], float] | None = None,
        synthetic_rate: float | None = None,
    ):
        self.limits = limits
        self.heartbeat = Heartbeat()
        self._cost = cost
        self._clock = clock or asyncio.get_running_loop().time
        self._device = SimDevice(limits, synthetic_rate)
        self._steps: deque[_Step] = deque()
        self._timeline = Timeline(lambda count: cost.copy_seconds(count, limits.page_size))
        self._host = HostTimes() if cost.profile is None else cost.profile.host
        self._dead: EngineDead | None = None

    async def start(self) -> EngineLimits:
        """Nothing to load."""
        return self.limits

    def submit(self, plan: bytes, on_result: ResultHandler) -> None:
        decoded = decode_plan(plan)
        now = self._clock()
        if self._dead is None:
            try:
                self._begin(decoded, on_result, now)
                virtual_time.spend(self._host.launch)
            except BrokenPlan as error:
                self._die(f"the simulated device refuses step {decoded.step}: {error}")
        if self._dead is not None:
            asyncio.get_running_loop().call_soon(on_result, self._dead)

    def on_death(self, tell: Callable[[str], None]) -> None:
        """It dies of plans only, whose handlers are told."""

    def flush(self) -> None:
        """Results are never held back."""

    def abandon(self) -> None:
        """``close`` never waits."""

    async def close(self) -> None:
        """Fail the steps in flight."""
        self._die("engine closed")

    def _begin(self, plan: StepPlan, on_result: ResultHandler, now: float) -> None:
        computed = self._device.take(plan)
        if plan.copies:
            self._timeline.start_copies(plan.step, unpack(plan.copies, 3), now)
        timing = self._timing(plan, computed) if len(computed.rows.slots) else NO_ROWS
        step = self._timeline.start_step(timing, now, alone=not self._steps)
        timer = asyncio.get_running_loop().call_later(max(step.done - now, 0.0), self._report)
        seconds = timing.seconds or 0.0
        self._steps.append(_Step(plan.step, computed, now, step.done, seconds, on_result, timer))
        self.heartbeat.enter("wait", self._steps[0].number)

    def _timing(self, plan: StepPlan, computed: Computed) -> StepTiming:
        starts, lengths = unpack(plan.rows, 3).astype(np.int64).T[1:]
        samples = computed.num_samples // plan.decode_steps
        timing = self._cost.timing(plan.step, starts, lengths, samples, plan.decode_steps)
        return timing._replace(loop=0.0)  # the loop is this one

    def _report(self) -> None:
        """The oldest step is done."""
        step = self._steps.popleft()
        if self._steps:
            self.heartbeat.enter("wait", self._steps[0].number)
        else:
            self.heartbeat.enter("idle")
        ended = self._timeline.finish_copies(step.number, step.t_done)
        self._device.report([copies.pages for copies in ended])
        result = StepResult(
            step=step.number,
            tokens=step.computed.tokens,
            logprobs=step.computed.logprobs,
            prompts=step.computed.prompts,
            pooled=step.computed.pooled,
            error=None,
            t_launch=step.t_launch,
            t_done=step.t_done,
            copied=tuple((copies.step, copies.seconds) for copies in ended),
            seconds=step.seconds,
        )
        virtual_time.spend(self._host.step)
        step.on_result(encode(result))
        virtual_time.spend(self._host.token * step.computed.num_samples)

    def _die(self, cause: str) -> None:
        self._dead = self._dead or EngineDead(cause)
        while self._steps:
            step = self._steps.popleft()
            step.timer.cancel()
            asyncio.get_running_loop().call_soon(step.on_result, self._dead)


def build_sim(
    config: EngineConfig, spec: ModelSpec, clock: Callable[[], float] | None = None
) -> SimExecutor:
    """The executor of ``device="sim"``.

    Raises:
        ModelError: the model, or the configured cache, does not fit the simulated GPU.
    """
    limits, cost = resolve_sim(config, spec)
    rate = synthetic_rate(config.speculative_config)
    return SimExecutor(limits, cost, clock=clock, synthetic_rate=rate)


def resolve_sim(config: EngineConfig, spec: ModelSpec) -> tuple[EngineLimits, SimCost]:
    """Limits and step times of an H200 with the model that ``sim_profile`` names.

    Raises:
        ModelError: the model, or the configured cache, does not fit that GPU; or the profile's
            file cannot be read.
    """
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    shape = shape_of(config.sim_profile, spec)
    profile = find_profile(config.sim_profile)
    kv_itemsize = 1 if config.has_fp8_cache else None
    cost = SimCost(shape, H200, 4 if dtype == "float32" else 2, profile, kv_itemsize)
    if profile is not None and config.max_decode_steps is None:
        config = msgspec.structs.replace(config, max_decode_steps=profile.max_decode_steps)
    limits = resolve_limits(
        config,
        # Tokenizer and vocabulary are the model's own, the rest is the profile's.
        msgspec.structs.replace(spec, max_position_embeddings=shape.context_length),
        device="sim",
        dtype=dtype,
        cache_bytes=int(config.gpu_memory_utilization * H200.memory) - cost.weight_bytes,
        host_bytes=int(H200.host_memory),
        bytes_per_token=cost.kv_bytes,
        state_bytes=cost.state_bytes,
        step_sizes=profile.step_sizes if profile is not None else (),
    )
    return limits, cost
