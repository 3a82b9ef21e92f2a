"""The device's share of busy time, from samples."""

from __future__ import annotations

import pytest

from asyncllm.server.metrics.server import BUSY_SECONDS, BusyShare


def test_the_share_is_of_the_latest_seconds() -> None:
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


def test_it_is_never_above_one() -> None:
    busy = BusyShare()
    busy.sample(1.0, 0.0)
    busy.sample(2.0, 1.5)  # a long step has just come back
    assert busy.share == 1.0
