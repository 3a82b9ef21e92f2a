"""What traces tell of the host: launching, reading requests, and the event loop."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

import numpy as np

from asyncllm.engine.recording.trace_file import Arrival, Event, Plan, Result, Trace
from asyncllm.executor.sim.profile import NOTHING, Curve, HostTimes, StepShape
from asyncllm.lab.replay.least_squares import line, rising, rounded, solve
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
