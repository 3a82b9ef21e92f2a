"""The engine's own figures: percentiles, gaps between steps, and the same again from /metrics."""

from __future__ import annotations

import random

import pytest

from asyncllm.engine.stats import FINE_BUCKETS, Distribution, EngineStats
from asyncllm.lab.bench.server import figures, parse, quantile
from asyncllm.server.metrics import engine
from asyncllm.server.metrics.metric import write
from asyncllm.wire.messages import StepResult


def result(
    t_done: float = 0.0,
    *,
    seconds: float = 0.0,
    launch: float = 0.0,
    collect: float = 0.0,
    idle: float | None = None,
) -> StepResult:
    return StepResult(
        step=0,
        tokens=b"",
        logprobs=(),
        error=None,
        t_launch=0.0,
        t_done=t_done,
        seconds=seconds,
        launch_seconds=launch,
        collect_seconds=collect,
        idle_seconds=idle,
    )


def test_fine_buckets() -> None:
    assert FINE_BUCKETS[0] == 1e-6
    assert 0.1 in FINE_BUCKETS
    assert FINE_BUCKETS[-1] == 6.3
    assert list(FINE_BUCKETS) == sorted(FINE_BUCKETS)


def test_percentiles_are_exact_and_of_a_stretch() -> None:
    values = Distribution()
    assert values.percentile(99) is None
    for value in range(101):
        values.observe(value)
    assert values.percentile(99) == 99
    mark = values.count
    assert values.percentile(99, mark) is None
    for later in (5.0, 7.0, 6.0):
        values.observe(later)
    assert values.percentile(50, mark) == 6.0
    assert values.percentile(100, mark) == 7.0
    assert values.percentile(0) == 0.0


def test_percentiles_of_the_latest_once_more_were_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "KEPT", 8)
    values = Distribution()
    for value in range(21):
        values.observe(value)
        kept = range(max(0, value - 7), value + 1)
        assert values.percentile(0) == kept[0]
        assert values.percentile(100) == kept[-1]
        for wanted in range(1, len(kept) + 1):
            since = values.count - wanted
            assert values.percentile(0, since) == kept[-wanted]
            assert values.percentile(100, since) == kept[-1]
    assert values.percentile(0, since=0) == 13
    assert sum(values.histogram.counts) == 21


def test_only_gaps_before_ready_steps_count() -> None:
    stats = EngineStats()
    stats.step_submitted(1, now=0.0, alone=True)
    stats.step_submitted(1, now=0.0, alone=False)
    stats.step_done(result(idle=9.0), 1.0, followed=True)  # nothing was before it
    stats.step_done(result(idle=0.25), 2.0, followed=False)
    assert stats.launch_gap.percentile(100) == 0.25
    stats.step_submitted(1, now=5.0, alone=True)
    stats.step_done(result(idle=3.0), 6.0, followed=True)  # there was nothing to do
    stats.step_done(result(idle=None), 7.0, followed=True)
    stats.step_done(result(idle=-1e-9), 8.0, followed=False)  # clocks of devices are not perfect
    assert stats.launch_gap.count == 2
    assert stats.launch_gap.percentile(0) == 0.0


def test_active_is_the_time_with_a_step_in_flight() -> None:
    stats = EngineStats()
    stats.step_submitted(1, now=1.0, alone=True)
    stats.step_submitted(1, now=1.5, alone=False)
    stats.step_done(result(), 2.0, followed=True)
    stats.step_done(result(), 4.0, followed=False)
    stats.step_submitted(1, now=10.0, alone=True)
    stats.step_done(result(), 10.5, followed=False)
    assert stats.device_active == pytest.approx(3.5)


def random_steps(stats: EngineStats, draw: random.Random, count: int) -> None:
    stats.step_submitted(1, now=0.0, alone=True)
    for i in range(count):
        stats.cpu_plan += 30e-6
        stats.cpu_apply += 20e-6
        stats.cpu_deliver += 10e-6
        done = result(
            t_done=float(i),
            seconds=1e-3,
            launch=40e-6,
            collect=5e-6,
            idle=draw.lognormvariate(-12, 1),
        )
        stats.step_done(done, i + draw.lognormvariate(-9, 1), followed=True)


def test_figures_of_a_stretch_of_time_and_the_same_from_metrics() -> None:
    draw, stats = random.Random(1), EngineStats()
    random_steps(stats, draw, 500)
    stats.drafts["lookup"], stats.drafted["lookup"], stats.drafted_right["lookup"] = 3, 20, 12
    before, scraped = stats.snapshot(), parse(write(engine.METRICS, stats))
    random_steps(stats, draw, 2000)
    stats.drafts |= {"lookup": 5, "grammar": 1}
    stats.drafted |= {"lookup": 30, "grammar": 6}
    stats.drafted_right |= {"lookup": 13, "grammar": 5}
    own = stats.since(before)
    assert (own.drafts, own.drafted, own.drafted_right) == (3, 16, 6)
    assert own.steps == 2000
    assert own.busy_share == pytest.approx(2.0 / own.seconds)
    each = (own.plan_us, own.apply_us, own.deliver_us, own.launch_us, own.collect_us)
    assert each == pytest.approx((30, 20, 10, 40, 5))
    assert own.launch_gap_us is not None
    assert own.result_lag_ms is not None
    assert own.launch_gap_us[0] < own.launch_gap_us[1]

    seen = figures(scraped, parse(write(engine.METRICS, stats)), own.seconds)
    assert seen.steps == own.steps
    assert (seen.drafts, seen.drafted, seen.drafted_right) == (3, 16, 6)
    assert seen.busy_share == pytest.approx(own.busy_share)
    each = (seen.plan_us, seen.apply_us, seen.deliver_us, seen.launch_us, seen.collect_us)
    assert each == pytest.approx((30, 20, 10, 40, 5))
    assert seen.launch_gap_us is not None
    assert seen.result_lag_ms is not None
    assert seen.launch_gap_us[0] == pytest.approx(own.launch_gap_us[0], rel=1e-6)
    # Within a bucket of five to a factor of ten.
    assert seen.launch_gap_us[1] == pytest.approx(own.launch_gap_us[1], rel=0.4)
    assert seen.result_lag_ms[0] == pytest.approx(own.result_lag_ms[0], rel=0.4)
    assert seen.result_lag_ms[1] >= own.result_lag_ms[1]


def test_an_engine_that_did_nothing() -> None:
    stats = EngineStats()
    own = stats.since(stats.snapshot())
    assert (own.steps, own.plan_us, own.launch_gap_us, own.result_lag_ms) == (0, 0.0, None, None)
    assert figures({}, {}, 1.0).launch_gap_us is None


def test_quantiles_between_two_scrapes() -> None:
    def samples(*counts: float) -> dict[str, float]:
        limits = ("0.1", "1.0", "10.0", "+Inf")
        pairs = zip(limits, counts, strict=True)
        return {f'x_bucket{{le="{limit}"}}': count for limit, count in pairs}

    before, after = samples(5, 5, 5, 5), samples(5, 15, 25, 25)
    assert quantile(before, after, "x", 0.5) == pytest.approx(1.0)
    assert quantile(before, after, "x", 0.75) == pytest.approx(5.5)
    assert quantile(before, after, "x", 1.0) == pytest.approx(10.0)
    assert quantile(before, before, "x", 0.5) is None
    assert quantile(before, samples(5, 5, 5, 6), "x", 0.5) == 10.0
    assert quantile(before, after, "y", 0.5) is None


def test_parsing_metrics() -> None:
    text = '# HELP a b\na_total 3.0\nb{le="+Inf"} 4e-06\nodd line\n\nnan NaN\n'
    samples = parse(text)
    assert samples["a_total"] == 3.0
    assert samples['b{le="+Inf"}'] == 4e-06
    assert "odd" not in samples
