"""Latency against load, as a picture. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from asyncllm.lab.bench.cases import OnlineCase
    from asyncllm.lab.bench.report import OnlineRow, Report

_FORMATS: Final = (".png", ".svg", ".pdf")
_PANELS: Final = {
    "time to first token, ms": {"ttft_p50": "p50", "ttft_p99": "p99"},
    "between tokens, ms": {"itl_p50": "p50", "itl_p99": "p99"},
    "generated tokens per second": {"tok_s": ""},
}


def check(path: Path, cases: Sequence[OnlineCase]) -> None:
    """Refuse a plot that cannot be drawn, before anything is measured.

    Raises:
        BadRequest: the message says what to do.
    """
    loads = max(
        len({case.clients for case in cases if case.clients}),
        len({case.rate for case in cases if case.rate}),
    )
    if loads < 2:
        raise BadRequest("a plot needs two loads at least: see --clients and --rates")
    if path.suffix.lower() not in _FORMATS:
        raise BadRequest(f"{path}: a plot's name ends in {', '.join(_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise BadRequest("a plot needs matplotlib: pip install -e '.[bench]' in the checkout")


def draw(path: Path, report: Report, earlier: Sequence[OnlineRow] = ()) -> None:
    """Draw a curve through the rows, and a dashed one through those of an earlier run.

    The load is the number of clients, or the rate of requests, whichever most rows have.
    """
    from matplotlib.figure import Figure

    by_rate = sum(row.rate is not None for row in report.online) > len(report.online) / 2
    load = "rate" if by_rate else "clients"
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(f"{report.model} on {report.machine}, {report.created}", fontsize="medium")
    for axes, (label, curves) in zip(figure.subplots(1, 3), _PANELS.items(), strict=True):
        for i, (name, legend) in enumerate(curves.items()):
            axes.plot(*_points(report.online, load, name), f"C{i}o-", label=legend)
            axes.plot(*_points(earlier, load, name), f"C{i}--")
        loads, _ = _points(report.online, load, "tok_s")
        axes.set(xlabel="requests per second" if by_rate else "clients", ylabel=label)
        axes.set_xscale("log")
        axes.set_xticks(loads, [f"{at:g}" for at in loads])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend()
    figure.savefig(path)


def _points(rows: Sequence[OnlineRow], load: str, name: str) -> tuple[list[Any], list[Any]]:
    """Loads in order, and the values there, where a row has both."""
    pairs = [(getattr(row, load), getattr(row, name)) for row in rows]
    shown = sorted(pair for pair in pairs if None not in pair)
    return [at for at, _ in shown], [value for _, value in shown]
