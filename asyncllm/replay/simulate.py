"""What if: the requests of a trace in virtual time, on a device as fast as the recorded one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop

from asyncllm.engine.policy import POLICIES
from asyncllm.engine.scheduling.step_time import StepShape
from asyncllm.errors import BadRequest
from asyncllm.replay.figures import Figures
from asyncllm.replay.run import Run
from asyncllm.replay.variants import BASELINE, Variant
from asyncllm.replay.verify import Replayed, named_policy
from asyncllm.wire.messages import TO_DEVICE, TO_HOST, StepPlan, unpack

NEVER = float("inf")


def simulate(replayed: Replayed, variant: Variant = BASELINE) -> Figures:
    """Serve the trace's requests under other limits, or another policy.

    Requests arrive when they did, and generate as much as they did; those that were aborted, or
    missed their deadline, end at the same time, whatever they have by then. Requests that were
    refused are not in a trace. A step takes what the step-time model says.

    Raises:
        BadRequest: the variant makes no sense, or the trace has too few steps to learn from.
    """
    if not replayed.times.fitted:
        raise BadRequest(f"{replayed.trace.path} has too few steps to tell how long they take")
    return _Simulation(replayed, variant).run()


@dataclass(frozen=True, slots=True)
class _Step:
    """``done`` on the device, known to the loop at ``reported``."""

    number: int
    done: float
    seconds: float
    reported: float


@dataclass(frozen=True, slots=True)
class _Copies:
    step: int
    seconds: float
    ends: float


class _Device:
    """Steps run one after the other; copies beside them, one after the other in each direction."""

    def __init__(self, replayed: Replayed, copy_seconds: float):
        self._times = replayed.times
        self._overhead = replayed.overhead
        self._copy_seconds = copy_seconds  # of one page
        self._steps: deque[_Step] = deque()
        self._copies: list[_Copies] = []
        self._free = 0.0
        self._last_done = 0.0
        self._stream_free = {TO_HOST: 0.0, TO_DEVICE: 0.0}

    @property
    def next_report(self) -> float:
        return self._steps[0].reported if self._steps else NEVER

    def submit(self, plan: StepPlan, shape: StepShape, now: float) -> None:
        self._begin_copies(plan, now)
        if shape.num_tokens:
            begun = max(now, self._free)
            done = self._free = begun + plan.decode_steps * self._times.seconds(shape)
        else:
            # It takes none of the device's time.
            begun = done = max((copies.ends for copies in self._copies), default=now)
        done = self._last_done = max(done, self._last_done)  # results come in order
        self._steps.append(_Step(plan.step, done, done - begun, done + self._overhead))

    def report(self) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The oldest step's seconds, and the copies that it acknowledges."""
        step = self._steps.popleft()
        landed = [c for c in self._copies if c.step <= step.number and c.ends <= step.done]
        self._copies = [c for c in self._copies if c not in landed]
        return step.seconds, tuple((c.step, c.seconds) for c in landed)

    def _begin_copies(self, plan: StepPlan, now: float) -> None:
        if not plan.copies:
            return
        ways = unpack(plan.copies, 3)[:, 0]
        total, ends = 0.0, now
        for way in (TO_HOST, TO_DEVICE):
            seconds = int((ways == way).sum()) * self._copy_seconds
            if seconds:
                self._stream_free[way] = max(now, self._stream_free[way]) + seconds
                ends = max(ends, self._stream_free[way])
            total += seconds
        self._copies.append(_Copies(plan.step, total, ends))


class _Simulation:
    """The engine's loop without the engine: whatever happens, plan until enough is in flight."""

    def __init__(self, replayed: Replayed, variant: Variant):
        recorded = replayed.trace.header
        limits = variant.limits(recorded.limits, replayed.workload)
        name = variant.policy(recorded.policy)
        policy = POLICIES[name]() if name in POLICIES else named_policy(replayed.trace)
        self._run = Run(replayed.workload, limits, policy)
        self._steps_in_flight = limits.steps_in_flight
        self._outcomes = replayed.outcomes
        copied = replayed.times.copy_seconds(1) * limits.page_size / recorded.limits.page_size
        self._device = _Device(replayed, copied or limits.page_copy_seconds)
        requests = replayed.workload.requests.values()
        self._arrivals = deque((r.now, r.id) for r in requests if r.id in self._outcomes)
        self._aborts = [(o.aborted, id) for id, o in self._outcomes.items() if o.length is None]
        heapify(self._aborts)
        self._next_step = 0

    def run(self) -> Figures:
        while True:
            report = self._device.next_report
            arrival = self._arrivals[0][0] if self._arrivals else NEVER
            abort = self._aborts[0][0] if self._aborts else NEVER
            now = min(report, arrival, abort)
            if now == NEVER:
                break
            if now == report:
                self._apply(now)
            elif now == arrival:
                _, id = self._arrivals.popleft()
                self._run.add(id, now)
            else:
                _, id = heappop(self._aborts)
                self._run.finish(id, now)
            self._fill(now)
        return self._run.figures

    def _apply(self, now: float) -> None:
        decode_steps = self._run.next_decode_steps
        for live in self._run.next_rows:
            length = self._outcomes[live.request.id].length
            after = -1 if length is None else length - len(live.seq.tokens) - 1
            if 0 <= after < decode_steps:
                live.stop_next(after)
        seconds, copied = self._device.report()
        self._run.apply(now, seconds, copied=copied)

    def _fill(self, now: float) -> None:
        while self._run.num_in_flight < self._steps_in_flight:
            planned = self._run.plan(self._next_step, now)
            if planned is None:
                break
            self._next_step += 1
            self._device.submit(planned.message, self._run.shape(planned.message), now)
