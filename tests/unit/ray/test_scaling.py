"""How many replicas there should be."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm.ray.replica import LOAD, TARGET, desired_replicas, load


@pytest.mark.parametrize(
    ("running", "waiting", "expected"),
    [
        (0, 0, 0.0),
        (64, 0, 0.25),
        (256, 0, 1.0),
        (256, 128, 1.5),
        (20, 20, 2.0),  # the KV cache is full
        (0, 3, 3.0),
    ],
)
def test_load(running: int, waiting: int, expected: float) -> None:
    assert load(running, waiting, max_num_seqs=256) == expected


def wanted(loads: list[float], current: int, target: int | None = None) -> float:
    context: Any = SimpleNamespace(
        aggregated_metrics={LOAD: dict(enumerate(loads))} if loads else {},
        current_num_replicas=current,
        target_num_replicas=current if target is None else target,
    )
    return desired_replicas(context)[0]


def test_replicas_follow_the_load() -> None:
    assert wanted([TARGET, TARGET], 2) == 2
    assert math.ceil(wanted([1.5, 1.5], 2)) == 4
    assert math.ceil(wanted([0.1, 0.1], 2)) == 1


def test_a_replica_that_has_not_reported_counts_like_the_others() -> None:
    assert wanted([TARGET], 3) == pytest.approx(3)


def test_without_reports_nothing_changes() -> None:
    assert wanted([], 2, target=3) == 3
