"""What rows of ``asyncllm bench`` tell of the event loop and of HTTP, for a profile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from asyncllm.bench.report import OnlineRow, Report
from asyncllm.replay.calibrate_host import NEVER, request_seconds
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
    rows = [row for report in reports for row in report.online]
    step, token = _loop_seconds(rows)
    request, prompt_token = request_seconds(traces)
    return HostTimes(
        idle=NEVER,
        step=step,
        token=token,
        request=request,
        prompt_token=prompt_token,
        client=_client_seconds(rows, steps),
    )


def _loop_seconds(rows: Sequence[OnlineRow]) -> tuple[float, float]:
    """``HostTimes.step`` and ``token``: the line through the cases."""
    points = [
        (
            row.tok_s * row.seconds / row.engine.steps,
            1e-6 * (row.engine.plan_us + row.engine.apply_us + row.engine.deliver_us),
        )
        for row in rows
        if row.engine is not None and row.engine.steps
    ]
    if len(points) < 2:
        return 0.0, 0.0
    tokens, seconds = np.array(points).T
    return line(tokens, seconds, 1.0 / seconds)


def _client_seconds(rows: Sequence[OnlineRow], steps: Sequence[Sequence[RecordedStep]]) -> float:
    """What a lone client waits longer for its first token than from the plan to the result."""
    waits = [1e-3 * row.ttft_p50 for row in rows if row.clients == 1 and row.ttft_p50 is not None]
    lone = [
        step.reported - step.planned
        for step in chain.from_iterable(steps)
        if step.alone and len(step.lengths) == 1 and step.lengths[0] <= 256
    ]
    if not waits or not lone:
        return 0.0
    return rounded(max(0.0, float(np.median(waits) - np.median(lone))))


def kept(report: Report) -> dict[str, Any]:
    """What a profile keeps of a report: nothing of the machine's files, and no engine figures."""
    rows = (report.offline, report.online)
    plain = [[msgspec.structs.replace(row, engine=None) for row in some] for some in rows]
    raw: dict[str, Any] = msgspec.to_builtins(
        msgspec.structs.replace(report, settings={}, offline=plain[0], online=plain[1])
    )
    return raw
