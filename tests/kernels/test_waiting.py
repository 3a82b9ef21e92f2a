"""Programs that wait for each other: not where others can keep them from running, nor for ever."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.kernels.device import on_hopper

pytest.importorskip("triton")

from asyncllm.kernels.gpu import Gpu
from asyncllm.kernels.triton import waiting
from asyncllm.kernels.triton.gemm.linear import fits
from asyncllm.kernels.triton.waiting import max_waiting_programs
from asyncllm.kernels.tuning import Shape, TmaSplitTile

PLACE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    waiting._is_shared.cache_clear()
    yield
    waiting._is_shared.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, mps: int | None) -> None:
    """A GPU of 66 multiprocessors, whose driver says whether there is MPS; None: it cannot."""

    def attribute(value: Any, attribute: int, device: int) -> int:
        if mps is None:
            return 1  # CUDA_ERROR_INVALID_VALUE
        assert (attribute, device) == (133, 0)
        value._obj.value = mps
        return 0

    driver = SimpleNamespace(cuDeviceGetAttribute=attribute)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(waiting, "gpu_of", lambda device: Gpu((9, 0), "half an H200", 66))


@pytest.mark.parametrize(("mps", "expected"), [(0, 66), (None, 66), (1, 1)])
def test_no_program_waits_where_mps_shares_the_gpu(
    mps: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, mps)
    assert max_waiting_programs(PLACE) == expected


def test_without_a_driver_kernels_are_compiled_for_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 0)

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert max_waiting_programs(PLACE) == 66


def test_projections_whose_programs_wait_need_room_for_all() -> None:
    x = torch.empty(64, 4096, dtype=torch.bfloat16)
    shape = Shape(4096, 4096, norm=False, epilogue="residual")
    shared, alone = TmaSplitTile(2, 4, 4), TmaSplitTile(2, 1, 4)
    assert fits(shared, x, shape, max_waiting=128)
    assert not fits(shared, x, shape, max_waiting=127)
    assert not fits(shared, x, shape, max_waiting=1)
    assert fits(alone, x, shape, max_waiting=1)


PROJECTION = """
from asyncllm.kernels.triton.gemm.linear import project
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.gemm.wgmma_tiles import arrivals
from asyncllm.kernels.tuning import TmaSplitTile
x, weight = (torch.ones(64, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
def launch():
    return project(TmaSplitTile(1, 2, 4), Projection(x, weight))
counters = arrivals(x.device)
"""

PREFILL = """
from asyncllm.kernels.attention import prefill_attention
from asyncllm.kernels.triton.attention.prefill_hopper import workspace_of
from asyncllm.kernels.types import AttentionSpec, PrefillRows
def ints(*values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)
spec = AttentionSpec(0, num_heads=8, num_kv_heads=8, head_dim=128, scale=0.1)
q = torch.ones(16, 8, 128, device="cuda", dtype=torch.bfloat16)
pages = torch.ones(256, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
table = torch.arange(256, device="cuda", dtype=torch.int32).view(1, 256)
def launch():
    rows = PrefillRows(ints(0), ints(4000), ints(0, 16))
    return prefill_attention(q, pages, pages, table, rows, spec)
programs = torch.cuda.get_device_properties(0).multi_processor_count
counters = workspace_of(q.device, programs, 128)[2]
"""

#: Programs wait for some that never run.
WAIT = """
import torch
from asyncllm.executor.device import CudaDevice
device = CudaDevice()
{kernel}
launch()
device.check()
assert not counters.any()
print("compiled", flush=True)
counters.fill_(-1000)
launch()
device.check()
"""


@on_hopper
@pytest.mark.parametrize("kernel", [PROJECTION, PREFILL], ids=["tma_split", "prefill_hopper"])
def test_waiting_in_vain_ends_with_an_error(kernel: str) -> None:
    """In a process of its own, whose context does not survive."""
    code = WAIT.format(kernel=kernel)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout == "compiled\n", process.stderr
    assert process.returncode == 1
    assert "waited ten seconds for its own programs" in process.stderr
