"""The text of metrics, read back by Prometheus' own parser for Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncllm.engine.stats import Distribution, EngineStats, Histogram
from asyncllm.server.http.traffic import Waits
from asyncllm.server.metrics import engine
from asyncllm.server.metrics.metric import Metric, counters, gauge, histogram, waits, write
from asyncllm.server.metrics.server import BUSY_SECONDS, BusyShare


def parsed(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_kind_of_value() -> None:
    source = SimpleNamespace(level=0.25, counts={"a": 1, "b": 2}, times=Histogram((0.5, 1.0)))
    for seconds in (0.1, 0.7, 0.8, 5.0):
        source.times.observe(seconds)
    table: tuple[Metric[Any], ...] = (
        gauge("level", "How high.", lambda s: s.level),
        gauge("nothing", "Not known yet.", lambda s: None),
        counters("things", "kind", "How many.", lambda s: s.counts),
        histogram("time_seconds", "How long.", lambda s: s.times),
    )
    found = parsed(write(table, source, {"model_name": "m"}))
    assert found.keys() == {"asyncllm_level", "asyncllm_things", "asyncllm_time_seconds"}
    level = found["asyncllm_level"]
    assert (level.type, level.documentation) == ("gauge", "How high.")
    assert [(s.labels, s.value) for s in level.samples] == [({"model_name": "m"}, 0.25)]
    assert [(s.name, s.labels["kind"], s.value) for s in found["asyncllm_things"].samples] == [
        ("asyncllm_things_total", "a", 1.0),
        ("asyncllm_things_total", "b", 2.0),
    ]
    assert [(s.labels.get("le"), s.value) for s in found["asyncllm_time_seconds"].samples] == [
        ("0.5", 1.0),
        ("1.0", 3.0),
        ("+Inf", 4.0),
        (None, 4.0),
        (None, 6.6),
    ]


def test_labels_may_hold_anything() -> None:
    name = 'a "model"\nof \\ mine, {x="y"}'
    text = write((gauge("level", "How high.", lambda _: 1.0),), None, {"model_name": name})
    [sample] = parsed(text)["asyncllm_level"].samples
    assert sample.labels == {"model_name": name}


def test_waits_have_a_histogram_a_p99_and_a_maximum() -> None:
    seen = Waits()
    source = SimpleNamespace(seen=seen)
    table: tuple[Metric[Any], ...] = waits("wait_seconds", "How long.", "seen")
    assert "asyncllm_wait_p99_seconds" not in write(table, source)
    seen.observe(2.0)
    text = write(table, source)
    assert "asyncllm_wait_seconds_count 1.0\n" in text
    assert "asyncllm_wait_p99_seconds 2.0\n" in text
    assert "asyncllm_wait_max_seconds 2.0\n" in text


def test_a_recent_p99_follows_without_being_computed_each_time() -> None:
    values = Distribution()
    assert values.recent_p99() is None
    for _ in range(64 * 100):
        values.observe(1.0)
    assert values.recent_p99() == 1.0
    for _ in range(90):
        values.observe(9.0)
    assert values.recent_p99() == 1.0, "too few are new"
    for _ in range(90):
        values.observe(9.0)
    assert values.recent_p99() == 9.0


def test_an_engine_that_did_nothing_has_all_its_metrics() -> None:
    found = parsed(write(engine.METRICS, EngineStats()))
    later = {"asyncllm_launch_gap_p99_seconds", "asyncllm_result_lag_p99_seconds"}
    names = {
        metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        for metric in engine.METRICS
    }
    assert found.keys() == names - later


def test_the_busy_share_is_of_the_latest_seconds() -> None:
    busy = BusyShare()
    assert busy.share == 0.0
    busy.sample(100.0, 7.0)
    assert busy.share == 0.0, "one sample says nothing"
    busy.sample(102.0, 8.0)
    assert busy.share == pytest.approx(0.5)
    for i in range(1, 201):  # idle for twice as long as it looks back
        busy.sample(102.0 + i * BUSY_SECONDS / 100, 8.0)
    assert busy.share == 0.0
    assert len(busy._samples) < 110


def test_a_busy_share_is_never_above_one() -> None:
    busy = BusyShare()
    busy.sample(1.0, 0.0)
    busy.sample(2.0, 1.5)  # a long step has just come back
    assert busy.share == 1.0
