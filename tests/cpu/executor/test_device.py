"""Times of work on the CPU, and the idle time between steps."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest, ModelError
from asyncllm.executor import choose_device as devices
from asyncllm.executor.build import build_worker
from asyncllm.executor.device import CpuDevice, CudaDevice, host_zeros
from asyncllm.models.spec import read_spec
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


class FakeCudaDevice:
    def __init__(self, index: int):
        self.index = index


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(devices, "CudaDevice", FakeCudaDevice)
    return monkeypatch


def have(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("device", "count", "index"),
    [("auto", 1, 0), ("auto", 2, 0), ("cuda", 2, 0), ("cuda:0", 1, 0), ("cuda:1", 2, 1)],
)
def test_a_gpu(device: str, count: int, index: int, gpus: pytest.MonkeyPatch) -> None:
    have(gpus, count)
    opened = devices.open_device(EngineConfig(device=device))
    assert isinstance(opened, FakeCudaDevice)
    assert opened.index == index


def test_ranks_have_the_gpus_of_their_machine(gpus: pytest.MonkeyPatch) -> None:
    have(gpus, 2)
    config = EngineConfig(device="cuda", tp=4)
    opened = [devices.open_device(config, rank, size=2) for rank in (0, 1)]
    assert [getattr(device, "index", None) for device in opened] == [0, 1]
    words = "device cuda with tp 4: PyTorch sees 2 CUDA devices, up to cuda:1"
    with pytest.raises(ModelError, match=words):
        devices.open_device(config)
    have(gpus, 1)
    words = "device cuda with tp 4, 2 on each machine: PyTorch sees 1 CUDA devices, up to cuda:0"
    with pytest.raises(ModelError, match=words):
        devices.open_device(config, 0, size=2)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_cpu(device: str, gpus: pytest.MonkeyPatch) -> None:
    have(gpus, 2 if device == "cpu" else 0)
    assert isinstance(devices.open_device(EngineConfig(device=device)), CpuDevice)


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [
        ("cuda", 0, "device cuda: PyTorch sees 0 CUDA devices"),
        ("cuda:1", 0, "device cuda:1: PyTorch sees 0 CUDA devices"),
        ("cuda:7", 2, "device cuda:7: PyTorch sees 2 CUDA devices, up to cuda:1"),
    ],
)
def test_a_gpu_that_is_not_there(
    device: str, count: int, message: str, gpus: pytest.MonkeyPatch
) -> None:
    have(gpus, count)
    with pytest.raises(ModelError) as caught:
        devices.open_device(EngineConfig(device=device))
    assert str(caught.value) == message
    assert caught.value.param == "device"


@pytest.mark.parametrize(
    "device", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda: 1", "cuda:1 ", "CUDA", "cuda:99999"]
)
def test_names_that_mean_nothing(device: str) -> None:
    with pytest.raises(BadRequest, match="device must be") as caught:
        EngineConfig(device=device)
    assert caught.value.param == "device"


def test_kernels_that_do_not_run_here_are_not_awaited() -> None:
    folder = Path(demo.path())
    waits: list[None] = []
    config = EngineConfig(device="cpu", max_model_len=64, max_num_seqs=2)
    worker = build_worker(
        config, folder, read_spec(folder), await_kernels=lambda: waits.append(None)
    )
    assert worker.limits.max_num_seqs == 2
    assert waits == []


@pytest.mark.parametrize("num_bytes", [0, 100, 5_000_000])
def test_memory_of_the_host_is_committed_zeros(num_bytes: int) -> None:
    memory = host_zeros(num_bytes)
    assert memory.dtype is torch.uint8
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    memory.fill_(1)
    assert memory.sum() == num_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="others have no huge pages")
def test_much_memory_of_the_host_may_be_in_huge_pages() -> None:
    memory = host_zeros(5_000_000)
    at, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and ":" not in first:
            begin, end = (int(number, 16) for number in first.split("-"))
            at = begin <= memory.data_ptr() < end
        elif at and first == "VmFlags:":
            flags = " ".join(rest)
    assert flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert " hg" in flags


def test_memory_that_the_host_does_not_have_is_refused() -> None:
    with pytest.raises(MemoryError):
        host_zeros(1 << 60)
