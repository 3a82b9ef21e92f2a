"""Figures as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncllm.bench.earlier import Comparison
    from asyncllm.bench.report import OfflineRow, OnlineRow, Report
    from asyncllm.engine.stats import StepFigures

_OFFLINE = ("case", "tokens in", "tokens out", "seconds", "tok/s", "ms/token", "TTFT p50 ms")
_ONLINE = (
    *("case", "requests", "failed", "seconds", "tok/s", "TTFT p50", "p99 ms", "TPOT p50 ms"),
    *("ITL p50", "p99", "max ms", "client CPU"),
)
_ENGINE = (
    *("case", "steps", "busy", "gap mean", "p99 us", "lag p99", "max ms"),
    *("plan", "apply", "deliver", "launch", "collect us/step", "loop CPU"),
)
_COMPARED = ("case", "", "here", "there", "engine", "ratio")


def header(report: Report) -> str:
    """Two lines that say what was measured."""
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    started = "" if report.start_s is None else f", started in {report.start_s:.1f} s"
    return f"asyncllm {report.asyncllm} on {report.machine}\n{report.model}{started}" + (
        f": {settings}" if settings else ""
    )


def offline_table(rows: Iterable[OfflineRow]) -> str:
    return table(
        _OFFLINE,
        [
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
        ],
    )


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
            lines.append(("  long prompts", "", "", "", "", *long, "", "", "", "", ""))
    return table(_ONLINE, lines)


def engine_table(figures: Iterable[tuple[str, StepFigures | None]]) -> str:
    """What the engine says of itself, for each case by name; nothing if it never did."""
    lines = [(case, *_engine_cells(steps)) for case, steps in figures if steps is not None]
    return table(_ENGINE, lines) if lines else ""


def comparison_table(compared: Iterable[Comparison]) -> str:
    return table(
        _COMPARED,
        [
            (c.case, c.metric, f"{c.ours:,.2f}", f"{c.theirs:,.2f}", c.engine, f"{c.ratio:.2f}")
            for c in compared
        ],
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Names to the left, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for line in lines
    )


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
    return "-" if value is None else f"{value:,.{digits}f}"
