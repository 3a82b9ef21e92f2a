"""Verify: feed a trace's events to the scheduler again, which must make the same plans."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from asyncllm.engine.drafts.drafting import Tally
from asyncllm.engine.policy import POLICIES, Policy
from asyncllm.engine.recording.record import digest_of
from asyncllm.engine.recording.trace_file import (
    Arrival,
    Event,
    Finish,
    Plan,
    PlanDigest,
    Result,
    Trace,
    TraceError,
)
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.speculation.choice import Choice, Drafted
from asyncllm.engine.scheduling.step import Planned
from asyncllm.engine.scheduling.timing.prefill_room import StepShape
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from asyncllm.errors import BadRequest
from asyncllm.executor.sim.profile import Profile
from asyncllm.lab.replay.calibrate import calibrate
from asyncllm.lab.replay.figures import Figures, percentile
from asyncllm.lab.replay.run import Run
from asyncllm.lab.replay.steps import RecordedStep, Sample
from asyncllm.lab.replay.workload import LiveRequest, Workload
from asyncllm.version import __version__

#: Seconds. A request finished so soon after its token was ended by that token's text.
AT_ONCE: Final = 0.002


class Outcome(msgspec.Struct, frozen=True):
    """How a request ended: by itself with ``length`` tokens, or else from outside at a time."""

    length: int | None
    aborted: float


class Mismatch(msgspec.Struct, frozen=True):
    """The first plan that differs from the recorded one, and how."""

    step: int
    now: float
    what: str


class Replayed(msgspec.Struct):
    """The findings of a replay.

    Attributes:
        figures: of the recorded run, up to the mismatch, if there is one.
        outcomes: by request.
        times: the step-time model, fitted to the steps of the trace.
        sample: steps of the trace, unless they were watched.
        overhead: median seconds from planning a step on an idle device to its result, beyond the
            step's own.
        seconds: duration of the replay.
    """

    trace: Trace
    workload: Workload
    figures: Figures
    times: StepTimeModel
    sample: Sample = msgspec.field(default_factory=Sample)
    outcomes: dict[int, Outcome] = {}
    overhead: float = 0.0
    seconds: float = 0.0
    mismatch: Mismatch | None = None
    _device: Profile | None = None

    def device(self) -> Profile | None:
        """The recorded device, fitted to ``sample``; None if that tells too little."""
        if self._device is None:
            with suppress(BadRequest):
                limits = self.trace.header.limits
                self._device = calibrate([self.sample.steps], limits, self.trace.path).profile
        return self._device


def verify(
    trace: Trace,
    policy: Policy | None = None,
    *,
    watch: Callable[[RecordedStep], None] | None = None,
) -> Replayed:
    """Replay a trace up to its end, or to the first plan that differs.

    Args:
        policy: the policy of the recording, if it is not one of asyncllm's own.
        watch: called with each step that has rows, when its result comes; by default, some of
            them are kept for ``Replayed.device``.

    Raises:
        TraceError: the trace is damaged, or its policy is not known.
    """
    replay = _Replay(trace, policy or named_policy(trace), watch)
    started = time.perf_counter()
    replay.run()
    replay.found.seconds = time.perf_counter() - started
    return replay.found


def named_policy(trace: Trace) -> Policy:
    """The policy of a trace.

    Raises:
        TraceError: it is not one of asyncllm's own.
    """
    name = trace.header.policy
    if name not in POLICIES:
        raise TraceError(
            f"{trace.path} was recorded with the policy {name}: pass it to "
            "asyncllm.lab.replay.verify.verify(trace, policy)"
        )
    return POLICIES[name]()


class _RecordedSpeculation:
    """``Speculation`` that decides as was recorded: a trace has no tokens to draft from."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}
        self.held: tuple[int, ...] = ()
        self.drafts: tuple[tuple[int, int], ...] = ()
        self.ahead = 0

    def choose(self, batch: RunningBatch, done: int, num_waiting: int) -> Choice:
        drafts = []
        for id, count in self.drafts:
            seq = batch.running[id]
            start = int(batch.computed[seq.slot])
            drafts.append(Drafted(seq, start, "", [0] * count, start + 1))
        return Choice(tuple(batch.running[id] for id in self.held), tuple(drafts), self.ahead)

    def planned(self, step: int, drafts: tuple[Drafted, ...]) -> None: ...
    def verified(self, draft: Drafted, num_right: int) -> None: ...
    def step_done(self, step: int, shape: StepShape | None, seconds: float, now: float) -> None: ...


class _Replay:
    def __init__(self, trace: Trace, policy: Policy, watch: Callable[[RecordedStep], None] | None):
        workload = Workload.of_trace(trace)
        self._events = trace.events()
        self._drafts = _RecordedSpeculation()
        self._run = run = Run(workload, trace.header.limits, policy, self._drafts)
        self.found = Replayed(trace, workload, run.figures, run.scheduler.times)
        self._watch = watch or self.found.sample.add
        self._planned: list[float] = []  # times of the plans in flight
        self._shapes: list[RecordedStep] = []  # of them, as far as known
        self._landed = 0.0  # time of the latest result
        self._now = 0.0  # time of the latest plan or result
        self._number = 0  # of the latest step
        self._overheads = array("d")

    def run(self) -> None:
        found = self.found
        for event in self._events:
            try:
                self._take(event)
            except Exception as error:
                # The recorded scheduler may have raised it too, and then the trace ends here. Or
                # the trace is damaged.
                self._differs(f"the scheduler raised {error!r}")
            if found.mismatch is not None:
                break
        for id, live in self._run.live.items():
            self._ended(id, live, found.workload.end, by_itself=False)
        found.overhead = max(0.0, percentile(self._overheads, 50) or 0.0)

    def _take(self, event: Event) -> None:
        if isinstance(event, Plan):
            self._plan(event)
        elif isinstance(event, Result):
            self._apply(event)
        elif isinstance(event, Arrival):
            self._run.add(event.id, event.now)
        elif isinstance(event, Finish):
            live = self._run.finish(event.id, event.now)
            if live is None:
                raise KeyError(event.id)
            at_once = live.last_token == self._landed and event.now - self._now <= AT_ONCE
            self._ended(event.id, live, event.now, by_itself=at_once)

    def _plan(self, event: Plan) -> None:
        self._now, self._number = event.now, event.number
        choice = self._drafts
        choice.held, choice.drafts, choice.ahead = event.held, event.drafts, event.ahead
        planned = self._run.plan(event.number, event.now)
        if planned is not None:
            rows = self._run.planned_rows
            self._shapes.append(
                RecordedStep(
                    rows.starts,
                    rows.lengths,
                    rows.num_samples,
                    rows.decode_steps,
                    planned=event.now,
                    alone=not self._planned,
                )
            )
            self._planned.append(event.now)
        what = _difference(event.digest, planned)
        if what:
            self._differs(what)

    def _differs(self, what: str) -> None:
        self.found.mismatch = Mismatch(self._number, self._now, what)

    def _apply(self, event: Result) -> None:
        planned = self._planned.pop(0)
        shape = self._shapes.pop(0)
        rows = self._run.next_rows
        if len(shape.lengths) and not event.failed:
            self._watch(
                shape._replace(before=self._landed, reported=event.now, seconds=event.seconds)
            )
        if planned >= self._landed and rows:
            self._overheads.append(event.now - planned - event.seconds)
        for row in event.stopped:
            self._run.stop(row)
        self._landed = self._now = event.now
        ended = self._run.apply(
            event.now,
            event.seconds,
            bad=event.bad,
            unmet=event.unmet,
            failed=event.failed,
            copied=event.copied,
            right=event.right,
        )
        for live in ended:
            self._ended(live.seq.id, live, event.now, by_itself=True)

    def _ended(self, id: int, live: LiveRequest, now: float, *, by_itself: bool) -> None:
        length = len(live.seq.tokens) if by_itself and live.num_output else None
        self.found.outcomes[id] = Outcome(length, now)


def _difference(recorded: PlanDigest | None, planned: Planned | None) -> str:
    """How the plans differ; empty if they do not."""
    if recorded is None or planned is None:
        if recorded is None and planned is None:
            return ""
        return "there was nothing to run" if recorded is None else "now there is nothing to run"
    digest = digest_of(planned.message)
    names = zip(PlanDigest._fields, recorded, digest, strict=True)
    return ", ".join(name.replace("_", " ") for name, was, is_ in names if was != is_)


def version_note(trace: Trace) -> str | None:
    """A warning if another version of asyncllm recorded the trace."""
    recorded = trace.header.asyncllm
    if recorded == __version__:
        return None
    return f"recorded by asyncllm {recorded}, replayed by {__version__}: plans may differ"


def checksum_note(trace: Trace) -> str | None:
    """A warning if damage to the file could go unnoticed."""
    if trace.has_checksums:
        return None
    return f"{trace.path} has an older format without checksums: damage may go unnoticed"
