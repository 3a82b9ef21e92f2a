"""Kernels that two threads launch on one stream in turn, as two engines of a process do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.attention import decode_attention, prefill_attention
from asyncllm.kernels.types import AttentionSpec, DecodeRows, PrefillRows
from tests.support.kernels.device import GPU

pytestmark = pytest.mark.gpu

SPEC = AttentionSpec(0, num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
PAGE_SIZE = 16
TIMES = 300

#: Launches kernels, and returns their results; calls its argument between two launches.
Work = Callable[[Callable[[], None]], list[Tensor]]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if GPU is None or not GPU.has_pdl:
        pytest.skip("needs kernels that overlap")


def half(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def attention(seed: int) -> Work:
    """A mixed step: 24 decode rows of several pieces overlap a chunk of a prompt."""
    torch.manual_seed(seed)
    rows, chunk, pages = 24, 64, 128
    table = torch.randperm((rows + 1) * pages, device="cuda").to(torch.int32).view(rows + 1, pages)
    keys, values = (half(table.numel(), PAGE_SIZE, SPEC.num_kv_heads, 128) for _ in range(2))
    q = half(rows + chunk, SPEC.num_heads, 128)
    slots = ints(list(range(rows)))
    lengths = ints([700 + 50 * i for i in range(rows)])
    prompt = ints([rows]), ints([1500]), ints([rows, rows + chunk])

    def work(between: Callable[[], None]) -> list[Tensor]:
        out = torch.zeros_like(q)
        prefill_attention(q, keys, values, table, PrefillRows(*prompt), SPEC, out=out)
        between()
        decode_attention(
            *(q[:rows], DecodeRows(keys, values, table, slots, lengths), SPEC),
            out=out[:rows],
            overlaps_previous=True,
        )
        return [out]

    return work


def projections(seed: int) -> Work:
    """Projections of 48 rows, of Qwen3-8B's shapes, whose programs share outputs."""
    if GPU is None or not GPU.is_hopper:
        pytest.skip("other kernels run here")
    from asyncllm.kernels.triton.gemm.linear import project
    from asyncllm.kernels.triton.gemm.projection import Projection
    from asyncllm.kernels.tuning import TmaSplitTile, TmaTile

    torch.manual_seed(seed)
    x, wide = half(48, 4096), half(48, 12288)
    o, down = half(4096, 4096) / 64, half(4096, 12288) / 110
    few = half(16, 4096)

    def work(between: Callable[[], None]) -> list[Tensor]:
        first = project(TmaSplitTile(1, 2, 12), Projection(x, o, residual=x.clone()))
        between()
        second = project(TmaSplitTile(1, 2, 12), Projection(wide, down, residual=first.clone()))
        between()
        return [first, second, project(TmaTile(1, 1, 128, 4, 5, 3), Projection(few, o))]

    return work


@pytest.mark.parametrize("make", [attention, projections])
def test_results_do_not_depend_on_another_thread(make: Callable[[int], Work]) -> None:
    """The kernels add up in a fixed order, so that results are the same to the last bit."""
    works = [make(seed) for seed in range(2)]
    expected = [work(torch.cuda.synchronize) for work in works]
    torch.cuda.synchronize()

    def repeat(work: Work, exact: list[Tensor], seed: int) -> int:
        """The number of runs with another result."""
        rng = random.Random(seed)

        def between() -> None:
            time.sleep(rng.choice([0.0, 0.0, 1e-6, 1e-5]))  # lets the other thread launch

        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(TIMES):
            for found, right in zip(work(between), exact, strict=True):
                wrong += (found != right).any()
        return int(wrong)

    with ThreadPoolExecutor(2) as threads:
        futures = [
            threads.submit(repeat, work, exact, seed)
            for seed, (work, exact) in enumerate(zip(works, expected, strict=True))
        ]
        assert [future.result() for future in futures] == [0, 0]
