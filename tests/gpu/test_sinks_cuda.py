"""Attention with sinks: each backend, captured or not, against dense attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.config import AttentionName
from asyncllm.kernels import attention as in_torch
from asyncllm.kernels.attention import apply_sinks
from tests.gpu.test_attention_cuda import BF16, NAMES, PLAIN, make_backend, remembered
from tests.gpu.test_captured_attention import (
    Graph,
    check,
    check_a_mixed_graph,
    decode_rows,
    make_graph_backend,
)
from tests.support.kernels.paged_sequences import DEVICE, NUM_SLOTS, Case, PagedSequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels that are not built are compiled
]

WINDOW = (128, None)
CASES = [
    Case(BF16, 64, 8, (WINDOW, PLAIN), num_kv_heads=8, has_sinks=True),  # gpt-oss
    Case(BF16, 64, 2, (PLAIN, WINDOW), has_sinks=True),  # FlashInfer decodes on CUDA cores
    Case(BF16, 128, 4, has_sinks=True),  # FlashInfer has FA3 for prompts, on Hopper
]
DECODES = {
    "one": [(0, 700, 1)],
    "first_token": [(0, 0, 1), (1, 1, 1)],
    "windows_end": [(0, 126, 1), (1, 127, 1), (2, 128, 1), (3, 129, 1), (4, 4000, 1)],
    "one_long": [(0, 4000, 1)],  # split among thread blocks
    "many": [(slot, 150 * slot, 1) for slot in range(NUM_SLOTS)],
}
PROMPTS = {
    "one": [(0, 0, 700)],
    "several": [(0, 0, 1), (1, 0, 17), (2, 0, 128), (3, 0, 129), (4, 0, 300)],
    "chunks": [(0, 100, 200), (1, 3900, 100), (2, 127, 2)],
}
MIXED = {
    "decodes_first": [(0, 4000, 1), (1, 5, 1), (2, 0, 300), (3, 600, 100), (4, 128, 2)],
    "last_chunk_of_one_token": [(0, 9, 1), (1, 0, 64), (2, 63, 1)],
}
STEPS = [
    pytest.param(rows, id=f"{kind}-{name}")
    for kind, steps in (("decodes", DECODES), ("prompts", PROMPTS), ("mixed", MIXED))
    for name, rows in steps.items()
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rows", STEPS)
def test_steps(rows: list[tuple[int, int, int]], case: Case, name: AttentionName) -> None:
    world = PagedSequences(case)
    backend = make_backend(world, name)
    step = remembered(rows, world)
    layers = world.step(step)
    plan = backend.plan(step, world.block_table)
    check(layers, [layer.run(backend, plan) for layer in layers])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("tokens", "rows"), [(1280, 32), (2560, 200)])
def test_a_mixed_graph(tokens: int, rows: int, case: Case, name: AttentionName) -> None:
    check_a_mixed_graph(tokens, rows, case, name, seeds=3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [1, 8, 64, 256])
def test_a_decode_graph(size: int, case: Case, name: AttentionName) -> None:
    """Two steps in it. With 256 rows, FlashInfer's FA2 splits none."""
    world = PagedSequences(case)
    backend = make_graph_backend(world, name)
    graph = Graph(world, backend, size, size, mixed=False, count=2)
    count = max(1, min(size - 1, NUM_SLOTS))
    rows = remembered(decode_rows(count, np.random.default_rng(size)), world)
    for _ in range(2):
        steps = []
        for _ in range(2):
            steps.append((rows.copy(), world.step(rows)))
            rows[:, 1] += 1
        for (_, layers), answers in zip(steps, graph.replay(*steps), strict=True):
            check(layers, answers)
            if name == "flashinfer":  # which is told that padding has no keys
                for answer in answers:
                    assert bool((answer[count:] == 0).all()), "padding"


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 300, 8192])
def test_the_kernel_that_adds_sinks(tokens: int, dtype: torch.dtype) -> None:
    """On the GPU and in a graph; ``tests/kernels`` has more of it."""
    shape = (tokens, 64, 64)
    before = torch.randn(shape, device=DEVICE).to(dtype)
    lse = 6 * torch.randn(shape[:2], device=DEVICE)
    sinks = torch.linspace(-9.0, 9.0, 64, device=DEVICE).to(dtype)
    expected = before.clone()
    in_torch.apply_sinks.reference(expected, lse, sinks)
    out = before.clone()
    apply_sinks(out, lse, sinks)
    torch.testing.assert_close(out, expected)
    out.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply_sinks(out, lse, sinks)
    graph.replay()
    torch.testing.assert_close(out, expected)
