"""Labels of tenants: few, hashed, and counters that never fall."""

from __future__ import annotations

from asyncllm.engine.stats import EngineStats
from asyncllm.engine.tenants import (
    MOST_LABELS,
    MOST_REMEMBERED,
    NOBODY,
    OTHER,
    RANK_SECONDS,
    Tenants,
    tenant_label,
)
from asyncllm.server.metrics import engine
from asyncllm.server.metrics.metric import write


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens(tenants: Tenants) -> dict[str, int]:
    return {label: counts.prompt + counts.generated for label, counts in tenants.labelled()}


def test_a_label_says_nothing_about_the_name() -> None:
    label = tenant_label("sk-secret")
    assert len(label) == 8
    assert "secret" not in label
    assert label == tenant_label("sk-secret") != tenant_label("sk-other")
    assert tenant_label("") == NOBODY
    assert tenant_label("\ud800")  # whatever the name is made of


def test_few_tenants_each_have_their_own() -> None:
    tenants = Tenants()
    for i in range(MOST_LABELS):
        tenants.ended(f"key-{i}", 10, i)
    assert tokens(tenants) == {
        OTHER: 0,
        **{tenant_label(f"key-{i}"): 10 + i for i in range(MOST_LABELS)},
    }


def test_ten_thousand_keys_make_few_series() -> None:
    clock, stats = Clock(), EngineStats()
    stats.tenants = Tenants(clock)
    names = [f"sk-raw-{i}" for i in range(10_000)]
    seen: set[str] = set()
    for name in names * 2:
        clock.now += RANK_SECONDS / 5000  # labels are given anew some times meanwhile
        stats.tenants.ended(name, 1, 1)
        seen |= tokens(stats.tenants).keys() if clock.now % 50 < 1 else set()
    text = write(engine.METRICS, stats)
    series = [line for line in text.splitlines() if line.startswith("asyncllm_tenant_")]
    assert len(series) <= 3 * (MOST_LABELS + 1)
    assert "sk-raw" not in text
    assert len(seen) <= 6 * MOST_LABELS, "each ranking gives new labels to so many at most"
    assert len(stats.tenants._tokens) <= MOST_REMEMBERED


def test_the_busiest_get_the_labels_and_other_never_falls() -> None:
    clock = Clock()
    tenants = Tenants(clock)
    for i in range(MOST_LABELS):
        tenants.ended(f"quiet-{i}", 1, 0)
    tenants.ended("busy", 1000, 0)
    assert tokens(tenants)[OTHER] == 1000
    clock.now = RANK_SECONDS
    tenants.ended("busy", 7, 0)
    after = tokens(tenants)
    assert after[OTHER] == 1000
    assert after[tenant_label("busy")] == 7, "a label begins at 0"
    assert len(after) == MOST_LABELS + 1
    # Its predecessor counts on under "other".
    gone = next(i for i in range(MOST_LABELS) if tenant_label(f"quiet-{i}") not in after)
    tenants.ended(f"quiet-{gone}", 5, 0)
    assert tokens(tenants)[OTHER] == 1005


def test_who_was_quiet_keeps_its_label_while_there_is_room() -> None:
    clock = Clock()
    tenants = Tenants(clock)
    tenants.ended("a", 3, 0)
    clock.now = RANK_SECONDS
    tenants.ended("b", 1, 0)
    clock.now = 2 * RANK_SECONDS
    tenants.ended("b", 1, 0)
    assert tokens(tenants)[tenant_label("a")] == 3
    assert tokens(tenants)[tenant_label("b")] == 2
