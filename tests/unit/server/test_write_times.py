"""Times of writes: streams of one turn are looked at together, after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from asyncllm.server.streaming.write_times import WriteTimes


def test_first_writes_and_those_after() -> None:
    now = [0.0]
    times = WriteTimes(lambda: now[0])
    first: Any = SimpleNamespace(arrived=1.0, written_at=0.0)
    second: Any = SimpleNamespace(arrived=2.5, written_at=0.0)

    times.written += [first, second]
    now[0] = 3.0
    times.observe()
    assert (times.first.total, sum(times.first.counts)) == (2.0 + 0.5, 2)
    assert sum(times.between.counts) == 0
    assert times.written == []

    times.written += [first, second]
    now[0] = 3.25
    times.observe()
    assert (times.between.total, sum(times.between.counts)) == (0.5, 2)

    times.written += [second]
    now[0] = 4.25
    times.observe()
    assert (times.between.total, sum(times.between.counts)) == (1.5, 3)
    assert (first.written_at, second.written_at) == (3.25, 4.25)
