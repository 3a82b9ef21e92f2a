"""What traces tell of the host: launching, reading requests, and the event loop."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from asyncllm.engine.recording.trace_file import Arrival, Event, Plan, Result, Trace
from asyncllm.engine.stats import StepFigures
from asyncllm.executor.sim.profile import NOTHING, Curve, HostTimes, StepShape
from asyncllm.lab.bench.report import OnlineRow, Report
from asyncllm.lab.replay.steps import RecordedStep

#: Points of ``HostTimes.idle``.
IDLE_TOKENS: Final = (128, 1024, 8192)
#: The quantile of an idle device's delays that counts: half of these steps, or more, wait for
#: something else as well, such as a capture, or the loop that reads a burst of requests.
QUANTILE: Final = 0.25
#: A result with as many first tokens shows how long an answer takes to begin, if there are several.
MIN_FIRSTS: Final = 4
MIN_RESULTS: Final = 3
#: Fewer of a kind in a trace are no measurement.
MIN_GAPS: Final = 16
#: A longer gap is an accident, in seconds.
LONGEST_GAP: Final = 0.02
#: Requests that the loop reads one after the other come at such distances, in seconds; those of
#: the same process come sooner.
READING: Final = (1e-4, 3e-3)
#: Fewer of them are no measurement.
MIN_REQUESTS: Final = 16


def idle_curve(traces: Iterable[Sequence[RecordedStep]]) -> Curve:
    """``HostTimes.idle``."""
    alone = [
        (int(step.lengths.sum()), max(0.0, step.reported - step.planned - step.seconds))
        for steps in traces
        for step in steps
        if step.alone
    ]
    if not alone:
        return NOTHING
    tokens, seconds = np.array(alone).T
    points = np.array(IDLE_TOKENS, dtype=float)
    columns, scale = rising(tokens, points), np.ones(len(tokens))
    for _ in range(4):
        found = solve(columns * scale[:, None], seconds * scale)
        late = seconds - columns @ found
        weight = np.where(late > 0.0, QUANTILE, 1.0 - QUANTILE)
        scale = np.sqrt(weight / np.maximum(np.abs(late), 1e-4))
    return Curve(tuple(IDLE_TOKENS), tuple(map(rounded, np.cumsum(found).tolist())))


def least_gaps(traces: Iterable[Sequence[RecordedStep]]) -> dict[str, float]:
    """``Kind.gap``, by name.

    Steps follow each other without a break while one is always in flight, unless the event loop is
    late; so of several traces, the one with the smallest gaps counts. Results are late by different
    times, which cancel out in the mean.
    """
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, steps in enumerate(traces):
        for step in steps:
            if not step.alone:
                kind = StepShape.of(step.starts, step.lengths, step.num_samples).kind
                found[kind][number].append(min(max(step.gap, -LONGEST_GAP), LONGEST_GAP))
    return {kind: max(0.0, _least_mean(list(gaps.values()))) for kind, gaps in found.items()}


def _least_mean(traced: list[list[float]]) -> float:
    """The least mean of a trace with enough gaps; of all gaps if none has."""
    enough = [gaps for gaps in traced if len(gaps) >= MIN_GAPS]
    return min(float(np.mean(gaps)) for gaps in enough or [[*chain.from_iterable(traced)]])


def request_seconds(traces: Iterable[Trace]) -> tuple[float, float]:
    """``HostTimes.request`` and ``prompt_token``; zeros without many requests at once over HTTP."""
    found = [pair for trace in traces for pair in _reading(trace)]
    if len(found) < MIN_REQUESTS:
        return 0.0, 0.0
    tokens, seconds = np.array(found).T
    return line(tokens, seconds, np.ones(len(tokens)))


def begin_seconds(
    traces: Iterable[Trace], steps: Iterable[Sequence[RecordedStep]], host: HostTimes
) -> float:
    """``HostTimes.begin``; 0 without results with many first tokens, and requests to read then.

    Args:
        traces: those that ``steps`` are of.
        host: all that the event loop does besides.
    """
    found = [
        (until - host.launch - (host.token + host.sent) * step.num_samples - host.request) / firsts
        for trace, some in zip(traces, steps, strict=True)
        for step, firsts, until in _beginning(trace, some)
    ]
    return max(0.0, float(np.quantile(found, QUANTILE))) if len(found) >= MIN_RESULTS else 0.0


def _beginning(
    trace: Trace, steps: Sequence[RecordedStep]
) -> Iterable[tuple[RecordedStep, int, float]]:
    """Steps that yielded many first tokens, how many, and the time from the plan that the loop
    made then to the next request, which waited to be read."""
    by_time = {step.reported: step for step in steps}
    latest: deque[Event] = deque(maxlen=4)
    for event in trace.events():
        latest.append(event)
        match list(latest):
            case [Result(now=result), Plan(now=plan), Arrival(now=arrival), Arrival(now=following)]:
                pass
            case _:
                continue
        step = by_time.get(result)
        if step is None or not READING[0] <= following - arrival <= READING[1]:
            continue
        firsts = step.num_samples - int((step.lengths == 1).sum())
        if firsts >= MIN_FIRSTS:
            yield step, firsts, arrival - plan


def _reading(trace: Trace) -> Iterable[tuple[int, float]]:
    """Prompt tokens of requests, and the time since the one before, if that is all it did."""
    last: float | None = None
    for event in trace.events():
        if isinstance(event, Arrival):
            if last is not None and READING[0] <= event.now - last <= READING[1]:
                yield event.num_prompt, event.now - last
            last = event.now
        elif isinstance(event, Plan | Result):
            last = None


#: Keeps columns that depend on each other apart.
RIDGE = 1e-9


def solve(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The coefficients >= 0 with which the columns come closest to ``wanted``.

    The active set method of Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.

    Args:
        columns: float64 [n, k].
        wanted: float64 [n].
    """
    norms = np.sqrt((columns**2).sum(axis=0))
    norms[norms == 0.0] = 1.0
    scaled = columns / norms
    gram = scaled.T @ scaled
    target = scaled.T @ wanted
    gram[np.diag_indices_from(gram)] += RIDGE
    found = np.zeros(len(norms))
    active = np.zeros(len(norms), dtype=bool)
    enough = 10 * RIDGE * float(np.linalg.norm(wanted))
    for _ in range(3 * len(norms)):
        slope = np.where(active, -np.inf, target - gram @ found)
        best = int(slope.argmax())
        if slope[best] <= enough:
            break
        active[best] = True
        while True:
            free = np.flatnonzero(active)
            trial = np.zeros_like(found)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            if (trial[free] > 0.0).all():
                found = trial
                break
            # As far towards the trial as no coefficient becomes negative.
            falling = free[trial[free] <= 0.0]
            step = found[falling] / (found[falling] - trial[falling])
            found = np.maximum(0.0, found + step.min() * (trial - found))
            active[falling[step.argmin()]] = False
            found[~active] = 0.0
    coefficients: np.ndarray = found / norms
    return coefficients


def rising(values: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Columns of a curve that never falls: its first value, and the rise to each further point."""
    columns = np.ones((len(values), len(points)))
    low, high = points[:-1], points[1:]
    columns[:, 1:] = np.clip((values[:, None] - low) / (high - low), 0.0, 1.0)
    return columns


def line(values: np.ndarray, wanted: np.ndarray, scale: np.ndarray) -> tuple[float, float]:
    """Start and slope of the line closest to ``wanted``; each error counts ``scale`` times."""
    columns = np.stack([np.ones(len(values)), values], axis=1)
    start, slope = solve(columns * scale[:, None], wanted * scale).tolist()
    return rounded(start), rounded(slope)


def rounded(value: float) -> float:
    """To four digits, so that a profile can be read."""
    return float(f"{value:.4g}")


def host_times(
    traces: Sequence[Trace], steps: Sequence[Sequence[RecordedStep]], reports: Sequence[Report]
) -> HostTimes:
    """All but ``HostTimes.idle``; zeros where nothing was measured.

    Args:
        traces: those that ``steps`` are of.
        reports: of the same engine.
    """
    online = [row for report in reports for row in report.online]
    offline = [row for report in reports for row in report.offline]
    # On a CPU, launching a step is running it, and the loop does not wait.
    waits = any(trace.header.limits.device == "cuda" for trace in traces)
    over_http = _cases(((row.tok_s * row.seconds, row.engine) for row in online), waits)
    inside = _cases(((row.out_tokens, row.engine) for row in offline), waits)
    best = over_http if len(over_http) >= 2 else inside
    step, whole = _line(best)
    token = min(_line(inside)[1], whole) if len(inside) >= 2 else whole
    request, prompt_token = request_seconds(traces)
    host = HostTimes(
        launch=_mean_launch(best),
        step=step,
        token=token,
        request=request,
        prompt_token=prompt_token,
        sent=rounded(whole - token),
    )
    begin = rounded(begin_seconds(traces, steps, host))
    client = max(0.0, _first_token_seconds(online, steps) - host.loop(1) - begin)
    return msgspec.structs.replace(host, begin=begin, client=rounded(client))


class _Case(NamedTuple):
    """The mean step of a case: its tokens, seconds that the loop waits for its launch, and seconds
    of the loop besides."""

    steps: int
    tokens: float
    launch: float
    loop: float


def _cases(rows: Iterable[tuple[float, StepFigures | None]], waits: bool) -> list[_Case]:
    """What the loop did in each case.

    Args:
        rows: the tokens of a case, and its figures.
        waits: the loop waits for launches, which is part of planning.
    """
    found = []
    for tokens, row in rows:
        if row is not None and row.steps:
            launch = min(row.launch_us, row.plan_us) if waits else 0.0
            loop = row.plan_us + row.apply_us + row.deliver_us - launch
            if loop > 0.0:
                found.append(_Case(row.steps, tokens / row.steps, 1e-6 * launch, 1e-6 * loop))
    return found


def _mean_launch(cases: Sequence[_Case]) -> float:
    steps = sum(case.steps for case in cases)
    return rounded(sum(case.launch * case.steps for case in cases) / max(steps, 1))


def _line(cases: Sequence[_Case]) -> tuple[float, float]:
    """What the event loop takes for a step, besides its launch, and for each of its tokens."""
    if len(cases) < 2:
        return 0.0, 0.0
    tokens, seconds = np.array([(case.tokens, case.loop) for case in cases]).T
    return line(tokens, seconds, 1.0 / seconds)


def _first_token_seconds(
    rows: Sequence[OnlineRow], steps: Sequence[Sequence[RecordedStep]]
) -> float:
    """What a lone client waits longer for its first token than from the plan to the result."""
    waits = [1e-3 * row.ttft_p50 for row in rows if row.clients == 1 and row.ttft_p50 is not None]
    lone = [
        step.reported - step.planned
        for step in chain.from_iterable(steps)
        if step.alone and len(step.lengths) == 1 and step.lengths[0] <= 256
    ]
    if not waits or not lone:
        return 0.0
    return float(np.median(waits) - np.median(lone))


def kept(report: Report) -> dict[str, Any]:
    """What a profile keeps of a report: nothing of the machine's files, and no engine figures."""
    rows = (report.offline, report.online)
    plain = [[msgspec.structs.replace(row, engine=None) for row in some] for some in rows]
    raw: dict[str, Any] = msgspec.to_builtins(
        msgspec.structs.replace(report, settings={}, offline=plain[0], online=plain[1])
    )
    return raw
