"""What rows of ``asyncllm bench`` tell of the event loop and of HTTP, for a profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncllm.bench.report import OnlineRow, Report
from asyncllm.engine.stats import StepFigures
from asyncllm.replay.calibrate_host import begin_seconds, request_seconds
from asyncllm.replay.least_squares import line, rounded
from asyncllm.replay.steps import RecordedStep
from asyncllm.replay.trace_file import Trace
from asyncllm.sim.profile import HostTimes


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
    request, prompt_token = request_seconds(traces)
    over_http = [_Case(row.tok_s * row.seconds, row.engine) for row in online if row.engine]
    step, sent = _loop_seconds(over_http)
    # Without HTTP, a token takes less.
    _, token = _loop_seconds([_Case(row.out_tokens, row.engine) for row in offline if row.engine])
    token = min(token, sent)
    host = HostTimes(
        launch=rounded(float(np.mean([case.launch for case in over_http] or [0.0]))),
        step=step,
        token=token,
        request=request,
        prompt_token=prompt_token,
        sent=rounded(sent - token),
    )
    begin = rounded(begin_seconds(traces, steps, host))
    client = max(0.0, _first_token_seconds(online, steps) - host.loop(1) - begin)
    return msgspec.structs.replace(host, begin=begin, client=rounded(client))


class _Case(NamedTuple):
    """What the loop did in a case that yielded so many tokens."""

    tokens: float
    figures: StepFigures

    @property
    def launch(self) -> float:
        """Seconds for which it waits for the launch of a step, which is part of planning it."""
        return 1e-6 * min(self.figures.launch_us, self.figures.plan_us)

    @property
    def loop(self) -> float:
        """Seconds for a step, besides."""
        figures = self.figures
        return 1e-6 * (figures.plan_us + figures.apply_us + figures.deliver_us) - self.launch


def _loop_seconds(cases: Iterable[_Case]) -> tuple[float, float]:
    """What the event loop takes for a step, besides its launch, and for each of its tokens."""
    points = [(case.tokens / case.figures.steps, case.loop) for case in cases if case.figures.steps]
    if len(points) < 2:
        return 0.0, 0.0
    tokens, seconds = np.array(points).T
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
