"""Latency against load, as a picture. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from asyncllm.bench.cases import OnlineCase
    from asyncllm.bench.report import OnlineRow, Report

_FORMATS = (".png", ".svg", ".pdf")
_PANELS = (
    ("time to first token, ms", (("ttft_p50", "p50"), ("ttft_p99", "p99"))),
    ("between tokens, ms", (("itl_p50", "p50"), ("itl_p99", "p99"))),
    ("generated tokens per second", (("tok_s", ""),)),
)


def check(path: Path, cases: Sequence[OnlineCase]) -> None:
    """Before anything is measured: could a plot of these cases be written there?

    Raises:
        BadRequest: no; the message says what to do.
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

    rows = report.online
    by_rate = sum(row.rate is not None for row in rows) > len(rows) / 2
    points = _by_load(rows, by_rate)
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(f"{report.model} on {report.machine}, {report.created}", fontsize="medium")
    for axes, (label, curves) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for i, (name, legend) in enumerate(curves):
            _curve(axes, points, name, color=f"C{i}", marker="o", label=legend)
            _curve(axes, _by_load(earlier, by_rate), name, color=f"C{i}", linestyle="--")
        axes.set_xlabel("requests per second" if by_rate else "clients")
        axes.set_ylabel(label)
        axes.set_xscale("log")
        axes.set_xticks([load for load, _ in points], [f"{load:g}" for load, _ in points])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend()
    figure.savefig(path)


def _by_load(rows: Sequence[OnlineRow], by_rate: bool) -> list[tuple[float, OnlineRow]]:
    loads = [(row.rate if by_rate else row.clients, row) for row in rows]
    found = [(float(load), row) for load, row in loads if load is not None]
    return sorted(found, key=lambda point: point[0])


def _curve(axes: Any, points: list[tuple[float, OnlineRow]], name: str, **style: Any) -> None:
    pairs = [(load, getattr(row, name)) for load, row in points]
    shown = [(load, value) for load, value in pairs if value is not None]
    if shown:
        axes.plot(*zip(*shown, strict=True), **style)
