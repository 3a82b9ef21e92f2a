"""The engine's counters: plain numbers, cheap enough for every step.

The metrics route turns them into Prometheus families when it is scraped; nothing here locks or
allocates per token.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asyncllm.engine.drafts.sources import KINDS
from asyncllm.engine.tenants import Tenants

if TYPE_CHECKING:
    from asyncllm.engine.scheduling.scheduler import Scheduler
    from asyncllm.wire.messages import StepResult

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
#: For times of microseconds: five limits for each factor of ten, from 1 us to 6.3 s.
FINE_BUCKETS = tuple(
    float(f"{step}e{power}") for power in range(-6, 1) for step in (1, 1.6, 2.5, 4, 6.3)
)
#: Why a request ended with an error: it made a step fail; its logits were not finite; its
#: constraints left no token; its output could not be delivered; the policy raised; the engine died.
ERROR_CAUSES = ("step", "logits", "constraint", "delivery", "policy", "engine")
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts of observations by bucket; ``bounds`` are inclusive upper limits, +Inf implied."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as text, observations at or below it), in the format of Prometheus."""
        bounds = (*map(str, self.bounds), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Distribution:
    """A histogram for the metrics, and the latest observations for exact percentiles."""

    #: Observations remembered: those of a minute of the fastest steps.
    KEPT = 1 << 16

    __slots__ = ("_latest", "_p99", "_p99_count", "count", "histogram")

    def __init__(self, bounds: tuple[float, ...] = FINE_BUCKETS):
        self.histogram = Histogram(bounds)
        self.count = 0
        self._latest = array("d")  # a ring, once it is full
        self._p99: float | None = None
        self._p99_count = 0

    def observe(self, value: float) -> None:
        self.histogram.observe(value)
        if self.count < self.KEPT:
            self._latest.append(value)
        else:
            self._latest[self.count % self.KEPT] = value
        self.count += 1

    def recent_p99(self) -> float | None:
        """The 99th percentile of what is kept, to 1/64 of it: for those who ask all the time."""
        new = self.count - self._p99_count
        if new and new >= len(self._latest) // 64:
            self._p99, self._p99_count = self.percentile(99), self.count
        return self._p99

    def percentile(self, percent: float, since: int = 0) -> float | None:
        """A percentile of the kept observations after the first ``since``; None without any."""
        # One atomic copy: another thread may be observing.
        latest, count = np.frombuffer(self._latest.tobytes()), self.count
        wanted = count - since
        if wanted <= 0:
            return None
        if wanted < len(latest):
            latest = np.roll(latest, -(count % self.KEPT))[-wanted:]
        return float(np.percentile(latest, percent))


def _latency() -> Histogram:
    return Histogram(LATENCY_BUCKETS)


def _tokens() -> Histogram:
    return Histogram(TOKEN_BUCKETS)


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine measured over some time; None for what was not measured.

    Attributes:
        seconds: the length of that time.
        steps: how many ended in it.
        busy_share: the share of the time in which the device ran steps.
        launch_gap_us: mean and p99 of the device's idle time between two steps, where the second
            was submitted before the first was known to be done.
        result_lag_ms: p99 and maximum of the time from a step's result to the loop's taking it.
        plan_us, apply_us, deliver_us: of the event loop, per step.
        launch_us, collect_us: of the executor thread, per step, without its waits for the device.
        loop_share: the share of the time in which the event loop's thread computed anything.
        drafts, drafted, drafted_right: drafts that were verified, their tokens, and how many of
            these were right.
    """

    seconds: float
    steps: int
    busy_share: float
    launch_gap_us: tuple[float, float] | None
    result_lag_ms: tuple[float, float] | None
    plan_us: float
    apply_us: float
    deliver_us: float
    launch_us: float
    collect_us: float
    loop_share: float | None = None
    drafts: int = 0
    drafted: int = 0
    drafted_right: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The sums at one time, for ``EngineStats.since``; ``time`` in seconds."""

    time: float
    steps: int
    sums: tuple[float, ...]
    gap_total: float
    num_gaps: int
    num_lags: int
    drafts: tuple[int, int, int]


@dataclass(slots=True)
class EngineStats:
    """Gauges are set after each step; counters only grow. Times are in seconds.

    ``pages_held`` are KV pages of live requests, ``pages_cached`` pages kept for prefix reuse only;
    with the free ones they add up to ``pages_total``. Of both, ``pages_pinned`` are evicted last.
    Of models with recurrent layers, ``states_running`` are state slots of running sequences, and
    ``states_cached`` those of checkpoints, of which ``states_used`` counts the uses. Of
    ``states_on_host``, there is a copy in the host's memory.
    ``prompt_tokens`` counts prompts whose answer has begun. Of the ``admitted_tokens`` of prompts
    that began to run, ``cached_tokens`` were in the prefix cache; of those, ``host_cached_tokens``
    had to be loaded from the host. Of ``pages_evicted``, the host tier had no time to save
    ``pages_dropped``. ``drafts`` counts the drafts that were verified by kind, ``drafted`` their
    tokens, and ``drafted_right`` those that were right. ``finished`` counts requests by finish
    reason, "deadline" and "error" included, ``errors`` the failed ones by cause, and ``tenants``
    what each tenant used.

    Sums over steps: ``cpu_plan``, ``cpu_apply`` and ``cpu_deliver`` of the loop thread,
    ``cpu_launch`` and ``cpu_collect`` of the executor thread without its waits, ``device_busy`` of
    the device. ``device_active`` is the time with a step in flight.

    ``books_checks`` counts how often the engine became idle and its pages and slots were counted,
    ``books_healed`` how often they did not add up. ``cancel_to_free`` is the time from an abort
    until all that the request had is free. ``launch_gap`` and ``result_lag`` are explained
    in ``StepFigures``.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    pages_pinned: int = 0
    host_pages_used: int = 0
    states_total: int = 0
    states_running: int = 0
    states_cached: int = 0
    states_on_host: int = 0

    steps: int = 0
    step_errors: int = 0
    preemptions: int = 0
    pages_evicted: int = 0
    pages_dropped: int = 0
    pins: int = 0
    pinned_pages_evicted: int = 0
    states_used: int = 0
    states_evicted: int = 0
    books_checks: int = 0
    books_healed: int = 0
    prompt_tokens: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    generation_tokens: int = 0
    drafts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    drafted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    drafted_right: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "deadline", "error"), 0)
    )
    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ERROR_CAUSES, 0))
    tenants: Tenants = field(default_factory=Tenants)

    cpu_plan: float = 0.0
    cpu_apply: float = 0.0
    cpu_deliver: float = 0.0
    cpu_launch: float = 0.0
    cpu_collect: float = 0.0
    device_busy: float = 0.0
    device_active: float = 0.0

    time_to_first_token: Histogram = field(default_factory=_latency)
    queue_time: Histogram = field(default_factory=_latency)
    request_latency: Histogram = field(default_factory=_latency)
    cancel_to_free: Histogram = field(default_factory=lambda: Histogram(FINE_BUCKETS))
    step_tokens: Histogram = field(default_factory=_tokens)
    launch_gap: Distribution = field(default_factory=Distribution)
    result_lag: Distribution = field(default_factory=Distribution)

    _active_since: float = 0.0
    _followed: bool = False

    def step_submitted(self, num_tokens: int, now: float, *, alone: bool) -> None:
        """``alone``: no other step is in flight."""
        self.step_tokens.observe(num_tokens)
        if alone:
            self._active_since = now

    def step_done(self, result: StepResult, now: float, *, followed: bool) -> None:
        """``followed``: the next step had been submitted when this result was taken."""
        self.steps += 1
        self.step_errors += result.error is not None
        self.device_busy += result.seconds
        self.device_active += now - self._active_since
        self._active_since = now
        self.cpu_launch += result.launch_seconds
        self.cpu_collect += result.collect_seconds
        self.result_lag.observe(max(now - result.t_done, 0.0))
        if self._followed and result.idle_seconds is not None:
            self.launch_gap.observe(max(result.idle_seconds, 0.0))
        self._followed = followed

    def update_gauges(self, scheduler: Scheduler) -> None:
        """Set the gauges."""
        cache = scheduler.cache
        self.running = len(scheduler.batch.running)
        self.waiting = scheduler.backlog.num_waiting
        self.preemptions = scheduler.departures.num_preemptions
        self.pages_total = cache.num_pages
        self.pages_held = cache.num_in_use
        self.pages_cached = cache.num_cached
        self.pages_pinned = cache.pins.num_pages
        self.pages_evicted = cache.num_evicted
        self.pages_dropped = cache.num_dropped
        self.pins = cache.pins.num_pins
        self.pinned_pages_evicted = cache.pins.num_evicted
        self.host_pages_used = cache.num_host_used
        states = cache.states
        self.states_total, self.states_running = states.num_slots, states.num_taken
        self.states_cached, self.states_on_host = states.num_kept, states.num_on_host
        self.states_used, self.states_evicted = states.num_used, states.num_evicted

        for kind, tally in scheduler.drafted.items():
            self.drafts[kind] = tally.num_drafts
            self.drafted[kind] = tally.num_drafted
            self.drafted_right[kind] = tally.num_right

    def stopped(self) -> None:
        """The engine has ended, and with it all requests."""
        self.running = self.waiting = self.pages_held = 0

    def snapshot(self) -> Snapshot:
        """The sums now."""
        return Snapshot(
            time=time.perf_counter(),
            steps=self.steps,
            sums=self._sums(),
            gap_total=self.launch_gap.histogram.total,
            num_gaps=self.launch_gap.count,
            num_lags=self.result_lag.count,
            drafts=self._drafts(),
        )

    def since(self, before: Snapshot) -> StepFigures:
        """What happened after a snapshot. Percentiles are of the latest ``Distribution.KEPT``."""
        seconds = time.perf_counter() - before.time
        steps = self.steps - before.steps
        busy, *each = (now - then for now, then in zip(self._sums(), before.sums, strict=True))
        plan, apply, deliver, launch, collect = (1e6 * total / max(steps, 1) for total in each)
        gaps, gap = self.launch_gap.count - before.num_gaps, self.launch_gap
        gap_p99 = gap.percentile(99, before.num_gaps)
        lag_p99 = self.result_lag.percentile(99, before.num_lags)
        lag_max = self.result_lag.percentile(100, before.num_lags)
        drafts = (now - then for now, then in zip(self._drafts(), before.drafts, strict=True))
        num_drafts, num_drafted, num_right = drafts
        return StepFigures(
            seconds=seconds,
            steps=steps,
            busy_share=busy / seconds,
            launch_gap_us=None
            if gap_p99 is None
            else (1e6 * (gap.histogram.total - before.gap_total) / gaps, 1e6 * gap_p99),
            result_lag_ms=None
            if lag_p99 is None or lag_max is None
            else (1e3 * lag_p99, 1e3 * lag_max),
            plan_us=plan,
            apply_us=apply,
            deliver_us=deliver,
            launch_us=launch,
            collect_us=collect,
            drafts=num_drafts,
            drafted=num_drafted,
            drafted_right=num_right,
        )

    def _drafts(self) -> tuple[int, int, int]:
        drafts, drafted, right = (
            sum(kinds.values()) for kinds in (self.drafts, self.drafted, self.drafted_right)
        )
        return drafts, drafted, right

    def _sums(self) -> tuple[float, ...]:
        return (
            self.device_busy,
            self.cpu_plan,
            self.cpu_apply,
            self.cpu_deliver,
            self.cpu_launch,
            self.cpu_collect,
        )
