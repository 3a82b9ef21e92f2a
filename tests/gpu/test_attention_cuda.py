"""Attention kernels over pages, against dense attention in float64."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionBackend
from asyncllm.attention.choose import choose_backend
from asyncllm.attention.flashinfer.library import find_nvcc, libraries_for, unsupported
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.executor.device import CudaDevice
from asyncllm.kernels.gpu import gpu_of
from tests.support.engine.waiting import no_waiting
from tests.support.kernels.paged_sequences import DEVICE, NUM_SLOTS, Case, PagedSequences
from tests.support.models.attending import UNCHANGED, forward_batch

if TYPE_CHECKING:
    from asyncllm.config import AttentionName

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels that are not built are compiled
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, WINDOW, CAP, BOTH = (None, None), (100, None), (None, 20.0), (100, 20.0)
CASES = [
    *(Case(BF16, 128, group) for group in (1, 2, 3, 4, 5, 8)),
    *(Case(FP16, 128, group) for group in (2, 4)),
    Case(BF16, 128, 2, page_size=1),
    Case(BF16, 128, 8, page_size=1),
    Case(BF16, 128, 2, page_size=64),
    Case(BF16, 64, 1, (PLAIN, WINDOW, CAP, BOTH)),
    Case(BF16, 64, 4, (PLAIN, WINDOW, CAP, BOTH)),
    Case(BF16, 64, 2, (PLAIN, (1, None))),
    Case(BF16, 256, 2, (PLAIN, WINDOW)),
    Case(BF16, 256, 4, (PLAIN, WINDOW)),
    Case(BF16, 512, 8),
    Case(BF16, 80, 2),
    Case(FP32, 64, 2, (PLAIN, BOTH)),
    Case(FP32, 512, 4),
]
NAMES: tuple[AttentionName, ...] = ("triton", "flashinfer")


def make_backend(world: PagedSequences, name: AttentionName) -> AttentionBackend:
    specs, dtype = world.specs, world.pool.storage.dtype
    if name == "flashinfer":
        if find_spec("flashinfer") is None or unsupported(specs, dtype):
            pytest.skip("not for FlashInfer")
        libraries = libraries_for(specs, dtype, gpu_of(DEVICE).capability)
        if find_nvcc() is None and not all(library.is_built() for library in libraries):
            pytest.skip("kernels that are not built, and no nvcc")
    kept = world.pool.storage.clone()
    backend = choose_backend(name, world.pool, specs, dtype, DEVICE, CudaDevice().upload)
    world.pool.storage.copy_(kept)  # it has run once, which wrote to page 0
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
    return remembered(rows, world)


def remembered(rows: list[tuple[int, int, int]], world: PagedSequences) -> np.ndarray:
    for slot, start, _ in rows:
        world.remember(slot, start)
    return np.array(rows, dtype=np.int32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_mixes_of_rows_match_dense_attention(case: Case, name: AttentionName) -> None:
    for seed in range(3):
        world = PagedSequences(case, seed)
        backend = make_backend(world, name)
        rows = random_rows(np.random.default_rng(seed), world)
        layers = world.step(rows)
        plan = backend.plan(rows, world.block_table)
        for layer in layers:
            layer.check(layer.run(backend, plan))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(0, 0, 1)], id="one_decode_at_the_start"),
        pytest.param([(3, 15, 1), (2, 16, 1), (1, 31, 1)], id="decodes_at_page_ends"),
        pytest.param([(i, 40 * i, 1) for i in range(NUM_SLOTS)], id="decodes_only"),
        pytest.param([(5, 0, 700)], id="one_prompt"),
        pytest.param([(0, 0, 16), (1, 0, 17), (2, 16, 16)], id="prompts_at_page_ends"),
        pytest.param([(0, 0, 128), (1, 0, 129), (2, 127, 2)], id="prompts_at_block_ends"),
        pytest.param([(0, 9, 1), (1, 0, 64), (2, 63, 1)], id="last_chunk_of_one_token"),
        pytest.param([(0, 4000, 1), (1, 3900, 100)], id="long_context"),
    ],
)
@pytest.mark.parametrize("group", [2, 4])
def test_shapes_at_the_edges(
    rows: list[tuple[int, int, int]], group: int, name: AttentionName
) -> None:
    world = PagedSequences(Case(BF16, 64, group, (PLAIN, WINDOW)))
    backend = make_backend(world, name)
    step = remembered(rows, world)
    for layer in world.step(step):
        layer.check(layer.run(backend))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [2, 4])
def test_steps_in_flight_do_not_disturb_each_other(group: int, name: AttentionName) -> None:
    world = PagedSequences(Case(BF16, 64, group, (PLAIN, WINDOW)))
    backend = make_backend(world, name)
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
@pytest.mark.parametrize("name", NAMES)
def test_planning_and_attending_never_wait_for_the_gpu(name: AttentionName) -> None:
    world = PagedSequences(Case(BF16, 64, 2, (PLAIN, WINDOW)))
    backend = make_backend(world, name)
    rows = random_rows(np.random.default_rng(1), world)
    layers = world.step(rows)
    batch = forward_batch(backend, rows, world.block_table, world.case.page_size)
    inputs = [layer.qkv.flatten(1).clone() for layer in layers]
    with no_waiting():
        batch.plan = backend.plan(rows, world.block_table)
        answers = [
            backend.forward(qkv, layer.spec, UNCHANGED, batch)
            for qkv, layer in zip(inputs, layers, strict=True)
        ]
    for layer, answer in zip(layers, answers, strict=True):
        layer.check(answer.view(len(answer), -1, layer.spec.head_dim))


def test_auto_takes_our_own_kernels_and_flashinfer_those_of_its_name() -> None:
    for dtype in (BF16, FP32):
        world = PagedSequences(Case(dtype, 64, 2))
        where = DEVICE, CudaDevice().upload
        backend = choose_backend("auto", world.pool, world.specs, dtype, *where)
        assert isinstance(backend, PagedBackend)
        sdpa = choose_backend("sdpa", world.pool, world.specs, dtype, *where)
        assert isinstance(sdpa, SdpaBackend)


#: Of FlashInfer and of ours; the latter are named after their functions.
FLASHINFER = {
    "decode": "BatchDecodeWithPagedKVCacheKernel",
    "fa2": "BatchPrefillWithPagedKVCacheKernel",
    "fa3": "flashinfer::PrefillWithKVCacheKernel",
}
OURS = ("_decode", "_prefill", "_extend")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize(
    ("head_dim", "group", "decoding", "mixed"),
    [
        (64, 2, {"decode"}, {"fa2"}),
        (64, 4, {"fa2"}, {"fa2"}),
        (128, 2, {"decode"}, {"fa2", "fa3"}),
        (128, 4, {"fa2"}, {"fa2", "fa3"}),
    ],
)
def test_flashinfer_runs_its_own_kernels_alone(
    head_dim: int, group: int, decoding: set[str], mixed: set[str]
) -> None:
    world = PagedSequences(Case(BF16, head_dim, group))
    backend = make_backend(world, "flashinfer")
    if not gpu_of(DEVICE).is_hopper:
        mixed = mixed - {"fa3"}
    for rows, expected in (
        ([(0, 300, 1), (1, 20, 1)], decoding),
        ([(2, 300, 1), (3, 20, 90), (4, 0, 60)], mixed),
        ([(5, 20, 90)], mixed - {"fa2"} or mixed),
    ):
        [layer] = world.step(remembered(rows, world))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            answer = layer.run(backend)
            torch.cuda.synchronize()
        layer.check(answer)
        names = [event.name for event in profile.events()]
        found = {key for key, kernel in FLASHINFER.items() if any(kernel in n for n in names)}
        assert found == expected, names
        assert not [name for name in names if name.startswith(OURS)]
