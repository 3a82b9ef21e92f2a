"""SdpaBackend on a GPU: what it computes on a CPU, without waiting for the device."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.kernels.types import AttentionSpec
from tests.support.engine.waiting import no_waiting
from tests.support.models.attending import UNCHANGED, attend, forward_batch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

HEADS, KV_HEADS, DIM, PAGE_SIZE = 8, 2, 64, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_outputs_are_those_of_the_cpu(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    lens = [(start, 1) for start in range(3, 700, 17)]
    lens += [(0, 5), (0, 600), (333, 300), (40, 2)]
    slots = np.random.default_rng(0).permutation(len(lens))
    rows = np.array([(s, *span) for s, span in zip(slots, lens, strict=True)], dtype=np.int32)
    max_pages = 50
    num_pages = len(lens) * max_pages
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(num_pages, generator=generator).int().view(len(lens), max_pages)
    num_tokens = sum(q_len for _, q_len in lens)
    qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, DIM, generator=generator)
    cached = torch.randn(2 * num_pages * PAGE_SIZE * KV_HEADS * DIM, generator=generator)
    spec = AttentionSpec(0, HEADS, KV_HEADS, DIM, DIM**-0.5, window, softcap)

    def run(device: str, compute: torch.dtype) -> torch.Tensor:
        # Both start from the same rounded values.
        pool = KVPool([spec], num_pages, PAGE_SIZE, compute, device)
        pool.storage.copy_(cached.to(dtype))
        backend = SdpaBackend(pool)
        there, new = table.to(device), qkv.to(dtype).to(device, compute)
        attend(backend, new, spec, rows, there, PAGE_SIZE)  # kernels are compiled
        batch = forward_batch(backend, rows, there, PAGE_SIZE)
        with no_waiting() if device == "cuda" else nullcontext():
            batch.plan = backend.plan(rows, there)
            out = backend.forward(new.flatten(1), spec, UNCHANGED, batch)
        return out.cpu().float()

    atol = 2e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(run("cuda", dtype), run("cpu", torch.float32), rtol=0, atol=atol)
