"""What traces tell of the host: launching, reading requests, and the event loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from asyncllm.replay.least_squares import line, rising, rounded, solve
from asyncllm.replay.steps import RecordedStep
from asyncllm.replay.trace_file import Arrival, Plan, Result, Trace
from asyncllm.sim.profile import Curve, StepShape

#: Of no tokens: nothing.
NEVER: Final = Curve((0.0,), (0.0,))
#: Points of ``HostTimes.idle``.
IDLE_TOKENS: Final = (128, 1024, 8192)
#: The quantile of an idle device's delays that counts: half of these steps, or more, wait for
#: something else as well, such as a capture, or the loop that reads a burst of requests.
QUANTILE: Final = 0.25
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
        return NEVER
    tokens, seconds = np.array(alone).T
    points = np.array(IDLE_TOKENS, dtype=float)
    columns, scale = rising(tokens, points), np.ones(len(tokens))
    for _ in range(4):
        found = solve(columns * scale[:, None], seconds * scale)
        late = seconds - columns @ found
        weight = np.where(late > 0.0, QUANTILE, 1.0 - QUANTILE)
        scale = np.sqrt(weight / np.maximum(np.abs(late), 1e-4))
    return Curve(tuple(IDLE_TOKENS), tuple(map(rounded, np.cumsum(found).tolist())))


def mean_gaps(traces: Iterable[Sequence[RecordedStep]]) -> dict[str, float]:
    """``Kind.gap``, by name.

    Steps follow each other without a break while one is always in flight. Results are late by
    different times, which cancel out in the mean.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for steps in traces:
        for step in steps:
            if not step.alone:
                gap = step.reported - step.before - step.seconds
                shape = StepShape.of(step.starts, step.lengths, step.num_samples)
                found[shape.kind].append(min(max(gap, -LONGEST_GAP), LONGEST_GAP))
    return {name: max(0.0, float(np.mean(gaps))) for name, gaps in found.items()}


def request_seconds(traces: Iterable[Trace]) -> tuple[float, float]:
    """``HostTimes.request`` and ``prompt_token``; zeros without many requests at once over HTTP."""
    found = [pair for trace in traces for pair in _reading(trace)]
    if len(found) < MIN_REQUESTS:
        return 0.0, 0.0
    tokens, seconds = np.array(found).T
    return line(tokens, seconds, np.ones(len(tokens)))


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
