"""A report as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from asyncllm.engine.stats import StepFigures
from asyncllm.lab.bench.report import Comparison, Earlier, OfflineRow, OnlineRow, Report
from asyncllm.system.terminal import table, wrapped

_OFFLINE: Final = ("case", "tokens in", "tokens out", "seconds", "tok/s", "ms/token", "TTFT")
_OFFLINE_LEGEND: Final = (
    "seconds: of the best repetition but the first; tok/s: generated; ms/token: of the longest "
    "answer; TTFT: ms to the first token, median"
)
_ONLINE: Final = (
    *("case", "asked", "failed", "seconds", "tok/s", "TTFT", "p99"),
    *("TPOT", "ITL", "p99", "max", "client"),
)
_ONLINE_LEGEND: Final = (
    "in ms as the clients see them, medians and p99: TTFT, from sending to the first token; TPOT, "
    "a request's mean time per token after it; ITL, between two events; client: CPU share of the "
    "busiest process that made the load"
)
_ENGINE: Final = (
    *("case", "steps", "busy", "gap", "p99", "lag p99", "max"),
    *("plan", "apply", "deliver", "launch", "collect", "loop"),
)
_ENGINE_LEGEND: Final = (
    "busy: share of the time in which the device ran steps; gap: us between two steps, mean and "
    "p99; lag: ms from a result to the event loop looking at it; plan, apply, deliver (event "
    "loop), launch, collect (executor thread): us per step; loop: CPU share of the event loop"
)
_DRAFTS: Final = ("case", "drafts", "drafted", "accepted", "share", "tokens/row")
_DRAFTS_LEGEND: Final = (
    "drafts: rows that verified one; drafted, accepted: their tokens, and those that were right; "
    "tokens/row: what such a row yielded, the accepted tokens and one more"
)
_SYNTHETIC: Final = "synthetic acceptance: chance decided what was right; "
_COMPARED: Final = ("case", "", "here", "there", "engine", "ratio")


def header(report: Report) -> str:
    """What was measured, where and when."""
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    started = "" if report.start_s is None else f", started in {report.start_s:.1f} s"
    lines = [
        f"asyncllm {report.asyncllm} on {report.machine}, {report.created}",
        f"{report.model}{started}" + (f": {settings}" if settings else ""),
    ]
    return "\n".join(map(wrapped, lines))


def whole(report: Report, earlier: Earlier | None) -> str:
    """All tables of a run."""
    rows: list[OfflineRow | OnlineRow] = [*report.offline, *report.online]
    parts = [
        header(report),
        offline_table(report.offline) if report.offline else "",
        online_table(report.online) if report.online else "",
        engine_table([(row.case, row.engine) for row in rows]),
        drafts_table([(row.case, row.engine) for row in rows], synthetic=is_synthetic(report)),
    ]
    if earlier is not None:
        compared = earlier.compare(report)
        parts += [
            f"compared with {earlier.path}; ratios above 1 are better",
            comparison_table(compared) if compared else "no case is in both",
        ]
    return "\n\n".join(part for part in parts if part)


def offline_table(rows: Iterable[OfflineRow]) -> str:
    lines = [
        (
            row.case,
            f"{row.in_tokens:,}",
            f"{row.out_tokens:,}",
            f"{min(row.seconds[1:] or row.seconds):.3f}",
            f"{row.tok_s:,.1f}",
            f"{row.ms_per_token:.3f}",
            f"{row.ttft_ms:.1f}",
        )
        for row in rows
    ]
    return table(_OFFLINE, lines, _OFFLINE_LEGEND)


def online_table(rows: Iterable[OnlineRow]) -> str:
    lines: list[Sequence[str]] = []
    for row in rows:
        times = (row.tpot_p50, row.itl_p50, row.itl_p99, row.itl_max)
        lines.append(
            (
                row.case,
                str(row.requests),
                str(row.failed),
                f"{row.seconds:.2f}",
                f"{row.tok_s:,.1f}",
                *(_number(ms, 1) for ms in (row.ttft_p50, row.ttft_p99)),
                *(_number(ms, 2) for ms in times),
                f"{row.client_busy:.0%}",
            )
        )
        if row.long_ttft_p50 is not None:
            long = (_number(row.long_ttft_p50, 1), _number(row.long_ttft_p99, 1))
            lines.append(("  long prompts", "", "", "", "", *long))
    return table(_ONLINE, lines, _ONLINE_LEGEND)


def engine_table(figures: Iterable[tuple[str, StepFigures | None]]) -> str:
    """The engine's own figures, for each case by name; nothing if there are none."""
    lines = [(case, *_engine_cells(steps)) for case, steps in figures if steps is not None]
    return table(_ENGINE, lines, _ENGINE_LEGEND) if lines else ""


def is_synthetic(report: Report) -> bool:
    """Whether chance decided what was right of drafts."""
    speculation: dict[str, Any] = report.settings.get("speculative_config") or {}
    return "synthetic_acceptance" in speculation


def drafts_table(
    figures: Iterable[tuple[str, StepFigures | None]], *, synthetic: bool = False
) -> str:
    """How good drafts were, for each case by name; nothing if there were none."""
    lines = [
        (
            case,
            *(f"{count:,}" for count in (steps.drafts, steps.drafted, steps.drafted_right)),
            f"{steps.drafted_right / max(steps.drafted, 1):.0%}",
            _number(1 + steps.drafted_right / steps.drafts if steps.drafts else None, 2),
        )
        for case, steps in figures
        if steps is not None
    ]
    legend = (_SYNTHETIC if synthetic else "") + _DRAFTS_LEGEND
    return table(_DRAFTS, lines, legend) if any(line[1] != "0" for line in lines) else ""


def comparison_table(compared: Iterable[Comparison]) -> str:
    lines = [
        (c.case, c.metric, f"{c.ours:,.2f}", f"{c.theirs:,.2f}", c.engine, f"{c.ratio:.2f}")
        for c in compared
    ]
    return table(_COMPARED, lines)


def _engine_cells(steps: StepFigures) -> tuple[str, ...]:
    gap, lag = steps.launch_gap_us or (None, None), steps.result_lag_ms or (None, None)
    each = (steps.plan_us, steps.apply_us, steps.deliver_us, steps.launch_us, steps.collect_us)
    return (
        f"{steps.steps:,}",
        f"{steps.busy_share:.1%}",
        *(_number(us, 1) for us in gap),
        *(_number(ms, 3) for ms in lag),
        *(_number(us, 1) for us in each),
        "-" if steps.loop_share is None else f"{steps.loop_share:.0%}",
    )


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:,.{digits if value < 1000 else 0}f}"
