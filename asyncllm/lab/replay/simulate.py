"""What if: the requests of a trace in virtual time, on a device whose step times are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush

import msgspec

from asyncllm.config import EngineLimits
from asyncllm.engine.policy import POLICIES, Policy
from asyncllm.engine.scheduling.sequence import FOREVER
from asyncllm.errors import BadRequest
from asyncllm.executor.sim.profile import StepShape
from asyncllm.executor.sim.timeline import NO_ROWS, StepTiming, Timeline
from asyncllm.lab.replay.acceptance import Acceptance
from asyncllm.lab.replay.figures import Figures, Record
from asyncllm.lab.replay.run import Run, StepRows
from asyncllm.lab.replay.variant import BASELINE, Variant
from asyncllm.lab.replay.verify import Replayed, named_policy
from asyncllm.lab.replay.workload import LiveRequest, Workload
from asyncllm.wire.messages import StepPlan, unpack

NEVER = float("inf")


def simulate(replayed: Replayed, variant: Variant = BASELINE) -> Figures:
    """Serve the trace's requests under other limits, or another policy.

    Requests arrive when they did and generate as many tokens; aborted and late ones end when they
    did. As large a share of their drafted tokens is right, see ``Acceptance``. Refused requests are
    not in a trace. Steps take as long as tables say that are fitted to the trace
    (``Replayed.device``), or in a short trace the step-time model.

    Raises:
        BadRequest: the variant makes no sense, or the trace has too few steps to learn from.
    """
    times, recorded = replayed.times, replayed.trace.header
    if not times.fitted:
        raise BadRequest(f"{replayed.trace.path} has too few steps to tell how long they take")
    limits = variant.limits(recorded.limits, replayed.workload)
    name = variant.policy(recorded.policy)
    policy = POLICIES[name]() if name in POLICIES else named_policy(replayed.trace)
    copied = times.copy_seconds(1) * limits.page_size / recorded.limits.page_size
    page_seconds = copied or limits.page_copy_seconds
    device = Device(_timing(replayed), lambda count: count * page_seconds, replayed.overhead)
    outcomes = replayed.outcomes
    return Simulation(
        replayed.workload,
        limits,
        policy,
        device,
        lengths={id: outcome.length for id, outcome in outcomes.items()},
        aborts=[(o.aborted, id) for id, o in outcomes.items() if o.length is None],
        acceptance=variant.acceptance(replayed.figures.records),
    ).run()


def _timing(replayed: Replayed) -> Callable[[int, StepRows], StepTiming]:
    """The times of the recorded device."""
    profile, times = replayed.device(), replayed.times
    if profile is None:
        return lambda _, rows: StepTiming(rows.decode_steps * times.seconds(rows.shape))
    tables = profile.steps.extended()

    def timing(step: int, rows: StepRows) -> StepTiming:
        shape = StepShape.of(rows.starts, rows.lengths, rows.num_samples)
        seconds = tables.seconds(shape, rows.decode_steps) * profile.ratio(shape.kind, step)
        return StepTiming(seconds, gap=profile.gap(shape.kind))

    return timing


class _Step(msgspec.Struct, frozen=True):
    """``done`` on the device; ``reported`` to the event loop."""

    number: int
    done: float
    seconds: float
    reported: float


class Device:
    """Runs plans in virtual time.

    Args:
        timing: the times of a step with rows, by its number and its rows.
        copy_seconds: the time to copy a number of pages in one direction.
        overhead: seconds from the end of a step to its result on the event loop.
    """

    def __init__(
        self,
        timing: Callable[[int, StepRows], StepTiming],
        copy_seconds: Callable[[int], float],
        overhead: float = 0.0,
    ):
        self._timing = timing
        self._overhead = overhead
        self._timeline = Timeline(copy_seconds)
        self._steps: deque[_Step] = deque()

    @property
    def next_report(self) -> float:
        return self._steps[0].reported if self._steps else NEVER

    def submit(self, plan: StepPlan, rows: StepRows, now: float) -> None:
        if plan.copies:
            self._timeline.start_copies(plan.step, unpack(plan.copies, 3), now)
        timing = self._timing(plan.step, rows) if len(rows.starts) else NO_ROWS
        begins, done, reported = self._timeline.start_step(timing, now, alone=not self._steps)
        self._steps.append(_Step(plan.step, done, done - begins, reported + self._overhead))

    def report(self) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The oldest step's seconds, and the copies that its result reports."""
        step = self._steps.popleft()
        ended = self._timeline.finish_copies(step.number, step.done)
        return step.seconds, tuple((copies.step, copies.seconds) for copies in ended)


class Simulation:
    """The engine's loop: after every event, plan until enough steps are in flight.

    Args:
        lengths: of the requests to serve: tokens at which they end by themselves, or None.
        aborts: (time, id) of requests that are ended from outside.
        acceptance: of the drafts of requests, by id.
        enforce_deadlines: refuse requests whose deadline cannot be met, and end late ones.
        scheduled: requests arrive at the times of their events; False: when ``arrive`` says.
    """

    def __init__(
        self,
        workload: Workload,
        limits: EngineLimits,
        policy: Policy,
        device: Device,
        *,
        lengths: Mapping[int, int | None],
        aborts: Iterable[tuple[float, int]] = (),
        acceptance: Mapping[int, Acceptance] = {},
        enforce_deadlines: bool = False,
        scheduled: bool = True,
    ):
        self._run = Run(workload, limits, policy, acceptance=acceptance)
        self._steps_in_flight = limits.steps_in_flight
        self._device = device
        self._lengths = lengths
        requests = workload.requests.values() if scheduled else ()
        self._arrivals = [(r.event.now, r.event.id) for r in requests if r.event.id in lengths]
        heapify(self._arrivals)
        self._aborts = list(aborts)
        heapify(self._aborts)
        self._enforce_deadlines = enforce_deadlines
        self._next_step = 0

    @property
    def figures(self) -> Figures:
        return self._run.figures

    @property
    def live(self) -> Mapping[int, LiveRequest]:
        """The requests that have arrived and have not ended, by id."""
        return self._run.live

    @property
    def next_event(self) -> float:
        """The time of the next event; NEVER if there is none."""
        arrival = self._arrivals[0][0] if self._arrivals else NEVER
        abort = self._aborts[0][0] if self._aborts else NEVER
        return min(self._device.next_report, arrival, abort)

    def arrive(self, now: float, id: int) -> None:
        """A request will enter the queue at ``now``, which is not past."""
        heappush(self._arrivals, (now, id))

    def run(self, ended: Callable[[int], None] | None = None) -> Figures:
        """Until all requests have ended; ``ended`` is told how many have."""
        num_ended = 0
        while self.next_event < NEVER:
            num_ended += len(self.advance())
            if ended is not None:
                ended(num_ended)
        return self.figures

    def advance(self) -> list[Record]:
        """Let the next event happen; returns the requests that ended by it."""
        now = self.next_event
        if now == self._device.next_report:
            ended = self._apply(now)
        elif self._arrivals and now == self._arrivals[0][0]:
            ended = self._arrive(now)
        else:
            ended = self._finish(heappop(self._aborts)[1], now)
        return ended + self._fill(now)

    def _arrive(self, now: float) -> list[Record]:
        _, id = heappop(self._arrivals)
        if not self._enforce_deadlines:
            self._run.add(id, now)
            return []
        deadline = self._run.offer(id, now)
        if deadline is None:
            return [self.figures.records[-1]]
        if deadline < FOREVER:
            heappush(self._aborts, (deadline, id))
        return []

    def _apply(self, now: float) -> list[Record]:
        right = self._run.next_right
        counts = self._run.next_counts(right)
        for live, count in zip(self._run.next_rows, counts, strict=True):
            length = self._lengths[live.seq.id]
            after = -1 if length is None else length - len(live.seq.tokens) - 1
            if 0 <= after < count:
                live.stop_next(after)
        seconds, copied = self._device.report()
        ended = self._run.apply(now, seconds, copied=copied, right=right)
        return [live.record for live in ended]

    def _finish(self, id: int, now: float) -> list[Record]:
        live = self._run.finish(id, now)
        return [] if live is None else [live.record]

    def _fill(self, now: float) -> list[Record]:
        while self._run.num_in_flight < self._steps_in_flight:
            planned = self._run.plan(self._next_step, now)
            if planned is None:
                break
            self._next_step += 1
            self._device.submit(planned.message, self._run.planned_rows, now)
        missed = self._run.scheduler.missed_deadlines()
        return [record for seq in missed for record in self._finish(seq.id, now)]
