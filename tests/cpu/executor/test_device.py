"""Times of work on the CPU, and the idle time between steps."""

from __future__ import annotations

import time
from typing import Any

import pytest

from asyncllm.executor.device import CpuDevice
from tests.support.models.page_copies import Tiers, plan, runner_of


def test_spans_tell_how_long_work_ran() -> None:
    span = CpuDevice().copy_stream().run(lambda: time.sleep(0.01))
    assert span.end.query()
    assert 0.01 <= span.seconds() < 1
    assert span.idle_seconds() is None


def test_idle_time_between_steps() -> None:
    runner, model = runner_of(Tiers(CpuDevice()))

    def run(step: int, **options: Any) -> float | None:
        ticket = runner.launch(plan(step, rows=[(0, step, 1)], **options))
        return runner.collect(ticket).idle_seconds

    assert run(0, admits={0: [1]}) is None
    time.sleep(0.01)
    idle = run(1)
    assert idle is not None
    assert 0.01 <= idle < 1
    model.failing = True
    with pytest.raises(RuntimeError, match="planted"):
        run(2)
    model.failing = False
    assert run(3) is None  # the end of the failed step is not known
