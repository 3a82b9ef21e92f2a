"""FlashInfer's kernels against dense attention in float64, and against PyTorch's kernels."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.attention.choose import choose_backend
from asyncllm.attention.flashinfer import FlashInferBackend
from asyncllm.attention.sdpa import SdpaBackend
from tests.gpu.paged_sequences import DEVICE, NUM_SLOTS, Case, PagedSequences

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels that are not built are compiled
    pytest.mark.usefixtures("flashinfer"),
]


@pytest.fixture
def flashinfer() -> None:
    pytest.importorskip("flashinfer")


BF16, FP16 = torch.bfloat16, torch.float16
PLAIN, WINDOW, CAP, BOTH = (None, None), (100, None), (None, 20.0), (100, 20.0)
CASES = [
    *(Case(BF16, 128, group) for group in (1, 2, 3, 4, 5, 8)),
    *(Case(FP16, 128, group) for group in (2, 4)),
    Case(BF16, 128, 2, page_size=1),
    Case(BF16, 128, 8, page_size=1),
    Case(BF16, 64, 1, (PLAIN, WINDOW, CAP, BOTH)),
    Case(BF16, 64, 4, (PLAIN, WINDOW, CAP, BOTH)),
    Case(BF16, 64, 2, (PLAIN, (1, None))),
    Case(BF16, 256, 2, (PLAIN, WINDOW)),
    Case(BF16, 256, 4, (PLAIN, WINDOW)),
]


def make_backend(world: PagedSequences) -> FlashInferBackend:
    specs, dtype = world.specs, world.pool.storage.dtype
    backend = choose_backend("flashinfer", world.pool, specs, dtype, DEVICE)
    assert isinstance(backend, FlashInferBackend)
    world.pool.storage.fill_(torch.nan)  # it has run once, which wrote to page 0
    return backend


def random_rows(rng: np.random.Generator, world: PagedSequences) -> np.ndarray:
    """Decode rows, then chunks of prompts with and without earlier chunks; slots shuffled."""
    slots = rng.permutation(NUM_SLOTS).tolist()
    num_decodes, num_chunks = int(rng.integers(0, 12)), int(rng.integers(1, 5))
    rows = []
    for i in range(num_decodes):
        longest = 4000 if i % 5 == 0 else 800
        rows.append((slots.pop(), int(rng.integers(0, longest)), 1))
    for i in range(num_chunks):
        start = int(rng.integers(1, 700)) if i % 2 == 0 else 0
        rows.append((slots.pop(), start, int(rng.integers(1, 300))))
    for slot, start, _ in rows:
        world.remember(slot, start)
    return np.array(rows, dtype=np.int32)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Raise where PyTorch would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_mixes_of_rows_match_dense_attention(case: Case) -> None:
    for seed in range(4):
        world = PagedSequences(case, seed)
        backend = make_backend(world)
        rows = random_rows(np.random.default_rng(seed), world)
        layers = world.step(rows)
        plan = backend.plan(rows, world.block_table)
        for layer in layers:
            layer.check(layer.run(backend, plan))


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(0, 0, 1)], id="one_decode_at_the_start"),
        pytest.param([(3, 15, 1), (2, 16, 1), (1, 31, 1)], id="decodes_at_page_ends"),
        pytest.param([(i, 40 * i, 1) for i in range(NUM_SLOTS)], id="decodes_only"),
        pytest.param([(5, 0, 700)], id="one_prompt"),
        pytest.param([(0, 0, 16), (1, 0, 17), (2, 16, 16)], id="prompts_at_page_ends"),
        pytest.param([(0, 9, 1), (1, 0, 64), (2, 63, 1)], id="last_chunk_of_one_token"),
        pytest.param([(0, 4000, 1), (1, 3900, 100)], id="long_context"),
    ],
)
@pytest.mark.parametrize("group", [2, 4])
def test_shapes_at_the_edges(rows: list[tuple[int, int, int]], group: int) -> None:
    world = PagedSequences(Case(BF16, 64, group, (PLAIN, WINDOW)))
    backend = make_backend(world)
    for slot, start, _ in rows:
        world.remember(slot, start)
    step = np.array(rows, dtype=np.int32)
    layers = world.step(step)
    plan = backend.plan(step, world.block_table)
    for layer in layers:
        layer.check(layer.run(backend, plan))


@pytest.mark.parametrize("group", [1, 4])
def test_agrees_with_the_torch_backend(group: int) -> None:
    case = Case(BF16, 64, group, (PLAIN, WINDOW, CAP))
    ours, theirs = PagedSequences(case, seed=7), PagedSequences(case, seed=7)
    backend, sdpa = make_backend(ours), SdpaBackend(theirs.pool)
    rows = random_rows(np.random.default_rng(7), ours)
    assert rows.tolist() == random_rows(np.random.default_rng(7), theirs).tolist()
    plan, sdpa_plan = backend.plan(rows, ours.block_table), sdpa.plan(rows, theirs.block_table)
    for layer, same in zip(ours.step(rows), theirs.step(rows), strict=True):
        answer, reference = layer.run(backend, plan), same.run(sdpa, sdpa_plan)
        torch.testing.assert_close(answer, reference, atol=1e-2, rtol=2e-2)
    # Both wrote the same to the same pages, and to no other.
    torch.testing.assert_close(
        ours.pool.storage, theirs.pool.storage, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("group", [2, 4])
def test_steps_in_flight_do_not_disturb_each_other(group: int) -> None:
    world = PagedSequences(Case(BF16, 64, group, (PLAIN, WINDOW)))
    backend = make_backend(world)
    lengths = dict.fromkeys(range(16), 0)
    steps = []
    rng = np.random.default_rng(3)
    for number in range(12):
        running = [slot for slot, length in lengths.items() if length > 0]
        rows = [(slot, lengths[slot], 1) for slot in rng.permutation(running).tolist()]
        q_len = int(rng.integers(1, 200))
        rows.append((number, 0, q_len))
        for slot, _, count in rows:
            lengths[slot] += count
        step = np.array(rows, dtype=np.int32)
        steps.append((step, world.step(step)))

    torch.cuda.synchronize()
    # The GPU is kept busy meanwhile, so that the host runs ahead as far as it may.
    torch.cuda._sleep(500_000_000)
    answers = []
    for step, layers in steps:
        plan = backend.plan(step, world.block_table)
        answers.append([layer.run(backend, plan) for layer in layers])
        torch.cuda._sleep(20_000_000)
    for (_, layers), given in zip(steps, answers, strict=True):
        for layer, answer in zip(layers, given, strict=True):
            layer.check(answer)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("group", [2, 4])
def test_planning_and_attending_never_wait_for_the_gpu(group: int) -> None:
    world = PagedSequences(Case(BF16, 64, group, (PLAIN, WINDOW)))
    backend = make_backend(world)
    rows = random_rows(np.random.default_rng(1), world)
    layers = world.step(rows)
    with no_synchronization():
        plan = backend.plan(rows, world.block_table)
        answers = [layer.run(backend, plan) for layer in layers]
    for layer, answer in zip(layers, answers, strict=True):
        layer.check(answer)


def test_auto_takes_flashinfer_where_it_can() -> None:
    world = PagedSequences(Case(BF16, 64, 2))
    backend = choose_backend("auto", world.pool, world.specs, BF16, DEVICE)
    assert isinstance(backend, FlashInferBackend)


def test_auto_takes_torch_kernels_for_float32() -> None:
    world = PagedSequences(Case(torch.float32, 64, 2))
    backend = choose_backend("auto", world.pool, world.specs, torch.float32, DEVICE)
    assert isinstance(backend, SdpaBackend)
