"""Times of work on the CPU, and the idle time between steps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from asyncllm.executor.device import CpuDevice, CudaDevice
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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("CUDA error: misaligned address", "waited ten seconds for its own programs"),
        ("CUDA error: an illegal memory access was encountered", "illegal memory access"),
    ],
)
def test_what_a_lost_device_says(error: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: torch.device) -> None:
        raise RuntimeError(error)

    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match=said):
        device.check()
