"""Figures of a server of ours, from its /metrics before and after a case."""

from __future__ import annotations

import time

from asyncllm.engine.stats import StepFigures
from asyncllm.lab.bench.server import fetch
from asyncllm.server.metrics.scrape import KEPT_SECONDS

Samples = dict[str, float]

_BUSY = "asyncllm_device_busy_seconds_total"
_STEPS = "asyncllm_steps_total"
_LOOP = "asyncllm_event_loop_cpu_seconds_total"
_GAP = "asyncllm_launch_gap_seconds"
_LAG = "asyncllm_result_lag_seconds"


def scrape(url: str, api_key: str | None = None) -> Samples:
    """The metrics of a server as of now; nothing if it has none of ours."""
    time.sleep(KEPT_SECONDS)  # it may have made a text a moment ago
    try:
        body = fetch(f"{url}/metrics", api_key)
    except OSError:  # URLError is one
        return {}
    samples = parse(body.decode(errors="replace"))
    return samples if _STEPS in samples else {}


def parse(text: str) -> Samples:
    """Samples of Prometheus' text format, by name with labels."""
    samples: Samples = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            try:
                samples[name] = float(value)
            except ValueError:
                continue
    return samples


def figures(before: Samples, after: Samples, seconds: float) -> StepFigures:
    """The differences; percentiles are interpolated within the buckets of histograms."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    steps = int(grown(_STEPS))

    def each(name: str) -> float:
        return 1e6 * grown(f"asyncllm_{name}_seconds_total") / max(steps, 1)

    gaps = grown(f"{_GAP}_count")
    gap_p99, lag_p99, lag_max = (
        quantile(before, after, name, q) for name, q in ((_GAP, 0.99), (_LAG, 0.99), (_LAG, 1.0))
    )
    return StepFigures(
        seconds=seconds,
        steps=steps,
        busy_share=grown(_BUSY) / seconds,
        launch_gap_us=None
        if gap_p99 is None
        else (1e6 * grown(f"{_GAP}_sum") / gaps, 1e6 * gap_p99),
        result_lag_ms=None
        if lag_p99 is None or lag_max is None
        else (1e3 * lag_p99, 1e3 * lag_max),
        plan_us=each("plan"),
        apply_us=each("apply"),
        deliver_us=each("deliver"),
        launch_us=each("launch"),
        collect_us=each("collect"),
        loop_share=grown(_LOOP) / seconds if _LOOP in after else None,
    )


def quantile(before: Samples, after: Samples, name: str, q: float) -> float | None:
    """Of the values that a histogram observed in between; None if there are none."""
    prefix = f'{name}_bucket{{le="'
    limits = sorted(
        (float(key.removeprefix(prefix).removesuffix('"}')), value - before.get(key, 0.0))
        for key, value in after.items()
        if key.startswith(prefix)
    )
    total = limits[-1][1] if limits else 0.0
    if total <= 0.0:
        return None
    low, below = 0.0, 0.0
    for limit, count in limits:
        if count >= q * total and limit != float("inf"):
            return low + (limit - low) * (q * total - below) / (count - below)
        if limit != float("inf"):
            low, below = limit, count
    return low
