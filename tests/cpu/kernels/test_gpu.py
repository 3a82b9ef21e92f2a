"""What a GPU has, and pretending an older one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.errors import KernelError
from asyncllm.executor.choose_device import compute_dtype
from asyncllm.executor.device import CpuDevice
from asyncllm.kernels import gpu as gpus
from asyncllm.kernels.gpu import PRETEND, Gpu, gpu_of, pretended

H200 = Gpu((9, 0), "NVIDIA H200", 132)


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Gpu], None]]:
    """Have a GPU."""

    def have(gpu: Gpu) -> None:
        major, minor = gpu.capability
        found = SimpleNamespace(
            name=gpu.name, major=major, minor=minor, multi_processor_count=gpu.multiprocessors
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    gpus._found.cache_clear()
    monkeypatch.delenv(PRETEND, raising=False)
    yield have
    gpus._found.cache_clear()


def test_it_is_what_torch_says(have: Callable[[Gpu], None]) -> None:
    have(H200)
    assert gpu_of(0) == gpu_of(torch.device("cuda", 0)) == H200


@pytest.mark.parametrize(
    ("capability", "has"),
    [
        ((7, 5), ""),
        ((8, 0), "bfloat16"),
        ((8, 6), "bfloat16"),
        ((8, 9), "bfloat16 fp8"),
        ((9, 0), "bfloat16 fp8 pdl hopper"),
        ((10, 0), "bfloat16 fp8 pdl"),
        ((12, 0), "bfloat16 fp8 pdl"),
    ],
)
def test_what_it_has(capability: tuple[int, int], has: str) -> None:
    gpu = Gpu(capability, "", 1)
    found = (
        ("bfloat16", gpu.has_bfloat16),
        ("fp8", gpu.has_fp8),
        ("pdl", gpu.has_pdl),
        ("hopper", gpu.is_hopper),
    )
    assert [name for name, value in found if value] == has.split()


def test_shared_memory() -> None:
    kib = {
        version: Gpu(version, "", 1).shared_bytes / 1024
        for version in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0))
    }
    assert list(kib.values()) == [163, 99, 99, 227, 227, 99, 99]


def test_an_older_gpu_can_be_pretended(
    have: Callable[[Gpu], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(H200)
    monkeypatch.setenv(PRETEND, "8.0")
    assert gpu_of(0) == Gpu((8, 0), "NVIDIA H200 as 8.0", 132)
    gpus._found.cache_clear()
    monkeypatch.setenv(PRETEND, "9.0")
    assert gpu_of(0) == H200
    gpus._found.cache_clear()
    monkeypatch.setenv(PRETEND, "")
    assert gpu_of(0) == H200


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Ampere", "'Ampere' is no compute capability"),
        ("80", "'80' is no compute capability"),
        ("10.0", r"NVIDIA H200 \(compute capability 9.0\) cannot pass for one of 10.0"),
    ],
)
def test_what_cannot_be_pretended(
    value: str, message: str, have: Callable[[Gpu], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(H200)
    monkeypatch.setenv(PRETEND, value)
    with pytest.raises(KernelError, match=message):
        gpu_of(0)


def test_any_gpu_can_be_pretended_where_there_is_none() -> None:
    with pretended(H200):
        assert gpu_of(torch.device("meta")) == H200
    with pytest.raises((AssertionError, RuntimeError)):
        gpu_of(torch.device("meta"))


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_gpus_without_bfloat16_compute_in_float16(
    capability: tuple[int, int], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    device = CpuDevice()
    device.torch_device = torch.device("cuda", 0)
    with pretended(Gpu(capability, "this GPU", 1)):
        assert compute_dtype(EngineConfig(), device) == dtype
        assert compute_dtype(EngineConfig(dtype="bfloat16"), device) == torch.bfloat16
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (dtype == torch.float16)
    assert all("has no bfloat16: computing in float16" in message for message in messages)
