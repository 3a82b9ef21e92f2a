"""What if: the requests of a trace in virtual time, on a device as fast as the recorded one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop

from asyncllm.engine.policy import POLICIES
from asyncllm.errors import BadRequest
from asyncllm.replay.figures import Figures
from asyncllm.replay.run import Run
from asyncllm.replay.variants import BASELINE, Variant
from asyncllm.replay.verify import Replayed, named_policy
from asyncllm.sim.profile import StepShape
from asyncllm.sim.timeline import Timeline
from asyncllm.wire.messages import StepPlan, unpack

NEVER = float("inf")


def simulate(replayed: Replayed, variant: Variant = BASELINE) -> Figures:
    """Serve the trace's requests under other limits, or another policy.

    Requests arrive when they did and generate as many tokens; aborted and late ones end when they
    did. Refused requests are not in a trace. Steps take as long as tables say that are fitted to
    the trace (``Replayed.device``), or in a short trace the step-time model.

    Raises:
        BadRequest: the variant makes no sense, or the trace has too few steps to learn from.
    """
    if not replayed.times.fitted:
        raise BadRequest(f"{replayed.trace.path} has too few steps to tell how long they take")
    return _Simulation(replayed, variant).run()


@dataclass(frozen=True, slots=True)
class _Step:
    """``done`` on the device; ``reported`` to the event loop."""

    number: int
    done: float
    seconds: float
    reported: float


class _Device:
    """Runs plans in virtual time, with the step times of the recorded device."""

    def __init__(self, replayed: Replayed, copy_seconds: float):
        self._profile = replayed.device()
        self._steps_of = self._profile.steps.extended() if self._profile is not None else None
        self._times = replayed.times
        self._overhead = replayed.overhead
        self._timeline = Timeline(lambda count: count * copy_seconds)
        self._steps: deque[_Step] = deque()

    @property
    def next_report(self) -> float:
        return self._steps[0].reported if self._steps else NEVER

    def submit(self, plan: StepPlan, run: Run, now: float) -> None:
        if plan.copies:
            self._timeline.start_copies(plan.step, unpack(plan.copies, 3), now)
        seconds, gap = self._seconds(plan, run) if plan.rows else (None, 0.0)
        begun, done = self._timeline.start_step(seconds, now, gap)
        self._steps.append(_Step(plan.step, done, done - begun, done + self._overhead))

    def _seconds(self, plan: StepPlan, run: Run) -> tuple[float, float]:
        """The step's time, and the gap before it."""
        if self._profile is None or self._steps_of is None:
            return plan.decode_steps * self._times.seconds(run.shape(plan)), 0.0
        shape = StepShape.of(*run.rows(plan))
        seconds = self._steps_of.seconds(shape, plan.decode_steps)
        seconds *= self._profile.ratio(shape.kind, plan.step)
        return seconds, self._profile.gap(shape.kind)

    def report(self) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The oldest step's seconds, and the copies that its result reports."""
        step = self._steps.popleft()
        ended = self._timeline.finish_copies(step.number, step.done)
        return step.seconds, tuple((copies.step, copies.seconds) for copies in ended)


class _Simulation:
    """The engine's loop: after every event, plan until enough steps are in flight."""

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
        self._arrivals = deque(
            (r.event.now, r.event.id) for r in requests if r.event.id in self._outcomes
        )
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
            length = self._outcomes[live.seq.id].length
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
            self._device.submit(planned.message, self._run, now)
