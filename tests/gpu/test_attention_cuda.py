"""Attention kernels over pages, against dense attention in float64."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.attention.base import ForwardBatch, GraphRows
from asyncllm.attention.choose import choose_backend
from asyncllm.attention.flashinfer import FlashInferPrompts, unsupported
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.executor.device import CudaDevice
from asyncllm.kernels.types import PrefillRows
from tests.support.engine.waiting import no_waiting
from tests.support.kernels.paged_sequences import DEVICE, NUM_SLOTS, Case, PagedSequences
from tests.support.models.attending import UNCHANGED, forward_batch

if TYPE_CHECKING:
    from torch import Tensor

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
    Case(BF16, 80, 2),
    Case(FP32, 64, 2, (PLAIN, BOTH)),
]
NAMES: tuple[AttentionName, ...] = ("triton", "flashinfer")


def make_backend(world: PagedSequences, name: AttentionName = "triton") -> PagedBackend:
    specs, dtype = world.specs, world.pool.storage.dtype
    if name == "flashinfer" and (find_spec("flashinfer") is None or unsupported(specs, dtype)):
        pytest.skip("not for FlashInfer")
    kept = world.pool.storage.clone()
    backend = choose_backend(name, world.pool, specs, dtype, DEVICE, CudaDevice().upload)
    assert isinstance(backend, PagedBackend)
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


def graph_tensors(rows: np.ndarray, count: int) -> tuple[Tensor, ...]:
    """Slots, decode lengths, starts and prefill offsets of rows that are padded to ``count``."""
    padded = np.zeros((count, 3), dtype=np.int32)
    padded[: len(rows)] = rows
    slots, starts, q_lens = padded.T
    single = int((q_lens == 1).cumprod().sum())
    decode_lengths = np.where(np.arange(count) < single, starts + 1, 0).astype(np.int32)
    q_offsets = np.concatenate([[0], q_lens.cumsum()]).astype(np.int32).clip(min=single)
    arrays = slots, decode_lengths, starts, q_offsets
    return tuple(torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE) for array in arrays)


def graph_rows(tensors: tuple[Tensor, ...], num_tokens: int) -> GraphRows:
    slots, decode_lengths, starts, q_offsets = tensors
    return GraphRows(num_tokens, slots, decode_lengths, PrefillRows(slots, starts, q_offsets))


@pytest.mark.parametrize("case", [*CASES[:6], Case(BF16, 64, 4, (PLAIN, BOTH))], ids=str)
def test_plans_of_device_tensors_match_those_of_the_host(case: Case) -> None:
    for seed in range(3):
        world = PagedSequences(case, seed)
        backend = make_backend(world)
        rows = random_rows(np.random.default_rng(seed), world)
        planned = graph_rows(graph_tensors(rows, 32), int(rows[:, 2].sum()))
        plan = backend.graph_plan(planned, world.block_table)
        backend.before_replay(plan, rows)
        for layer in world.step(rows):
            layer.check(layer.run(backend, plan))


def test_a_captured_step_serves_other_rows() -> None:
    world = PagedSequences(Case(BF16, 128, 2))
    backend = make_backend(world)
    spec, num_tokens = world.specs[0], 256
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    nothing = np.zeros((0, 3), dtype=np.int32)
    tensors = graph_tensors(nothing, 16)
    qkv = torch.zeros(num_tokens, width, dtype=BF16, device=DEVICE)
    ids, positions = (torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE) for _ in range(2))
    written = torch.full_like(ids, -1)

    def run() -> Tensor:
        plan = backend.graph_plan(graph_rows(tensors, num_tokens), world.block_table)
        backend.before_replay(plan, nothing)
        batch = ForwardBatch(ids, positions, written, None, backend, plan)
        return backend.forward(qkv, spec, UNCHANGED, batch)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for rows in (
        [(3, 700, 1), (2, 15, 1), (4, 0, 90), (5, 33, 100)],
        [(i, 40 * i, 1) for i in range(6, 16)],
        [(0, 0, 200)],
    ):
        step = remembered(rows, world)
        [layer] = world.step(step)
        count = len(layer.qkv)
        batch = forward_batch(backend, step, world.block_table, world.case.page_size)
        for target, source in zip(tensors, graph_tensors(step, 16), strict=True):
            target.copy_(source)
        qkv[:count] = layer.qkv.flatten(1)
        positions[:count] = batch.positions
        written.fill_(-1)
        written[:count] = batch.slot_mapping
        graph.replay()
        layer.check(out.view(num_tokens, spec.num_heads, spec.head_dim)[:count])


def test_auto_takes_our_own_kernels_and_flashinfer_those_of_its_name() -> None:
    for dtype in (BF16, FP32):
        world = PagedSequences(Case(dtype, 64, 2))
        where = DEVICE, CudaDevice().upload
        backend = choose_backend("auto", world.pool, world.specs, dtype, *where)
        assert isinstance(backend, PagedBackend)
        sdpa = choose_backend("sdpa", world.pool, world.specs, dtype, *where)
        assert isinstance(sdpa, SdpaBackend)


def test_flashinfer_attends_prompts() -> None:
    world = PagedSequences(Case(BF16, 64, 2))
    backend = make_backend(world, "flashinfer")
    assert isinstance(backend._prompts, FlashInferPrompts)
