"""What rows of ``asyncllm bench`` tell of the event loop and of HTTP, for a profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncllm.engine.recording.trace_file import Trace
from asyncllm.engine.stats import StepFigures
from asyncllm.executor.sim.profile import HostTimes
from asyncllm.lab.bench.report import OnlineRow, Report
from asyncllm.lab.replay.calibrate_host import begin_seconds, request_seconds
from asyncllm.lab.replay.least_squares import line, rounded
from asyncllm.lab.replay.steps import RecordedStep


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
