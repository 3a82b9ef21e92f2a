"""Which device ``--device`` means, on machines with any number of GPUs."""

from __future__ import annotations

import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest, ModelError
from asyncllm.executor import choose_device as devices
from asyncllm.executor.device import CpuDevice


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
