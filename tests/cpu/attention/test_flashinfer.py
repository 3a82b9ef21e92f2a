"""FlashInfer's backend: the rows that it hands to the kernels, and the order of their plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncllm.attention.base import GraphRows
from asyncllm.attention.flashinfer import kernels
from asyncllm.attention.flashinfer.backend import FlashInferBackend, FlashInferPlan
from asyncllm.attention.flashinfer.kernels import Place, PrefillKernel, Shape
from asyncllm.attention.flashinfer.library import HOPPER, Capability, Library
from asyncllm.attention.flashinfer.rows import HostRows, Staging
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.kernels.types import AttentionSpec, PrefillRows
from tests.support.models import fake_flashinfer
from tests.support.models.attending import forward_batch
from tests.support.models.paged_world import (
    DIM,
    HEADS,
    KV_HEADS,
    MAX_PAGES,
    PAGE_SIZE,
    SLOTS,
    World,
    row_lists,
    specs,
)

CPU = torch.device("cpu")
AMPERE: Capability = (8, 0)
gpus = st.sampled_from([AMPERE, HOPPER])


@pytest.fixture(autouse=True, scope="module")
def fake_libraries() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Library, "load", fake_flashinfer.load)
        # Heads of the world's size have FA3 on Hopper, too.
        patch.setattr(
            "asyncllm.attention.flashinfer.backend.prompt_template",
            lambda spec, capability, of_cache: "fa3" if capability == HOPPER else "fa2",
        )
        patch.setattr("asyncllm.attention.flashinfer.backend.PARTIAL_BYTES", 1)
        yield


def make_backend(
    world: World, capability: Capability = AMPERE, multiprocessors: int = 2
) -> FlashInferBackend:
    gpu = capability, multiprocessors
    return FlashInferBackend(world.pool, [world.spec], torch.float32, CPU, *gpu, torch.from_numpy)


def graph_rows(world: World, tokens: int, rows: int, mixed: bool) -> GraphRows:
    """Of the rows' number only; FlashInfer gets the rows themselves from the host."""
    zeros = torch.zeros(rows, dtype=torch.int32)
    offsets = torch.zeros(rows + 1, dtype=torch.int32)
    return GraphRows(tokens, zeros, zeros, PrefillRows(zeros, zeros, offsets) if mixed else None)


def run_padded(
    world: World, backend: FlashInferBackend, plan: FlashInferPlan, qkv: Tensor, tokens: int
) -> Tensor:
    """The rows' step, padded to so many tokens with NaN."""
    padding = tokens - len(qkv)
    batch = forward_batch(backend, world.rows, world.table, PAGE_SIZE, plan=plan)
    batch.positions = torch.cat([batch.positions, torch.zeros(padding, dtype=torch.int64)])
    batch.slot_mapping = torch.cat([batch.slot_mapping, torch.full((padding,), -1)])
    padded = torch.cat([qkv, torch.full((padding, *qkv.shape[1:]), torch.nan)])
    out = backend.forward(padded.flatten(1).clone(), world.spec, world.encoding, batch)
    return out.view(-1, HEADS, DIM)


@given(
    lens=row_lists,
    window=st.sampled_from([None, 1, 5]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    gpu=gpus,
)
def test_random_rows_match_dense_attention(
    lens: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    gpu: Capability,
) -> None:
    world = World(lens, specs(window, softcap, has_sinks))
    qkv = world.qkv(world.rows)
    expected = world.run(world.dense, qkv)
    answer = world.run(make_backend(world, gpu), qkv)
    torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)


@given(lens=row_lists, has_sinks=st.booleans(), window=st.sampled_from([None, 5]))
def test_all_backends_attend_alike_over_pages_in_8_bits(
    lens: list[tuple[int, int]], has_sinks: bool, window: int | None
) -> None:
    scales = torch.tensor([[0.02, 0.25], [3.0, 2**-7]])
    world = World(lens, specs(window, None, has_sinks), scales)
    qkv = world.qkv(world.rows)
    expected = world.run(PagedBackend(world.pool, torch.from_numpy), qkv)
    for backend in (SdpaBackend(world.pool), make_backend(world)):
        torch.testing.assert_close(world.run(backend, qkv), expected, atol=1e-5, rtol=1e-5)


@given(
    steps=st.lists(row_lists, min_size=1, max_size=3),
    decodes=st.integers(0, SLOTS - 1),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 5)),
    has_sinks=st.booleans(),
    gpu=gpus,
)
def test_one_mixed_plan_serves_any_rows(
    steps: list[list[tuple[int, int]]],
    decodes: int,
    padding: tuple[int, int],
    has_sinks: bool,
    gpu: Capability,
) -> None:
    steps = [[(start, 1) for start, _ in lens[:decodes]] + lens[decodes:] for lens in steps]
    num_rows = max(len(lens) for lens in steps) + padding[0]
    tokens = max(sum(n for _, n in lens) for lens in steps) + padding[1]
    world = World(steps[0], specs(has_sinks=has_sinks))
    backend = make_backend(world, gpu)
    plan = backend.graph_plan(graph_rows(world, tokens, num_rows, mixed=True), world.table)
    backend.before_replay(plan, np.zeros((0, 3), dtype=np.int32))
    captured = frozen(plan)
    for lens in steps:
        other = World(lens, world.spec)
        world.pool.storage.copy_(other.pool.storage)
        world.table.copy_(other.table)
        world.rows = other.rows
        qkv = world.qkv(world.rows)
        expected = other.run(other.dense, qkv)
        backend.before_replay(plan, world.rows)
        assert frozen(plan) == captured
        answer = run_padded(world, backend, plan, qkv, tokens)
        torch.testing.assert_close(answer[: len(qkv)], expected, atol=1e-5, rtol=1e-5)


@given(
    starts=st.lists(st.integers(0, 25), min_size=1, max_size=SLOTS - 1),
    padding=st.integers(0, 4),
    window=st.sampled_from([None, 5]),
    has_sinks=st.booleans(),
    multiprocessors=st.integers(1, 8),
)
def test_padding_of_decode_steps_is_zero(
    starts: list[int], padding: int, window: int | None, has_sinks: bool, multiprocessors: int
) -> None:
    """On CUDA cores without a window, else on tensor cores, with split rows and without."""
    world = World([(start, 1) for start in starts], specs(window, has_sinks=has_sinks))
    backend = make_backend(world, multiprocessors=multiprocessors)
    qkv = world.qkv(world.rows)
    expected = world.run(world.dense, qkv)
    count = len(starts) + padding
    plan = backend.graph_plan(graph_rows(world, count, count, mixed=False), world.table)
    backend.before_replay(plan, world.rows)
    answer = run_padded(world, backend, plan, qkv, count)
    torch.testing.assert_close(answer[: len(starts)], expected, atol=1e-5, rtol=1e-5)
    assert bool((answer[len(starts) :] == 0).all())


@pytest.mark.parametrize("window", [None, 3])
def test_plans_of_one_graph_do_not_disturb_each_other(window: int | None) -> None:
    """Several decode steps: all are planned before the first of them runs."""
    world = World([(7, 1), (0, 1), (11, 1)], specs(window))
    backend = make_backend(world)
    rows = graph_rows(world, 4, 4, mixed=False)
    plans = [backend.graph_plan(rows, world.table) for _ in range(3)]
    for _ in range(2):  # two replays
        steps = [world.rows + np.array([0, i, 0]) for i in range(3)]
        for plan, step in zip(plans, steps, strict=True):
            backend.before_replay(plan, step.astype(np.int32))
        for plan, step in zip(plans, steps, strict=True):
            world.rows = step.astype(np.int32)
            qkv = world.qkv(world.rows)
            expected = world.run(world.dense, qkv)
            answer = run_padded(world, backend, plan, qkv, 4)
            torch.testing.assert_close(answer[:3], expected, atol=1e-5, rtol=1e-5)
        world.rows = world.rows + np.array([0, 1, 0], dtype=np.int32)


def test_layers_of_one_kind_share_plans() -> None:
    world = World([(3, 2)], specs())
    layers = [AttentionSpec(i, HEADS, KV_HEADS, DIM, 1.0, 4 if i % 2 else None) for i in range(6)]
    backend = FlashInferBackend(world.pool, layers, torch.float32, CPU, AMPERE, 2, torch.from_numpy)
    plan = backend.plan(world.rows, world.table)
    [part] = plan.parts
    assert len(part.planned) == 2


def frozen(plan: FlashInferPlan) -> list[Any]:
    """What a captured launch keeps."""
    assert plan.packed is not None
    memory = [
        (planned.info, planned.memory.data_ptr()) for p in plan.parts for planned in p.planned
    ]
    rows = [tensor.data_ptr() for part in plan.parts for tensor in part.rows]
    return [plan.packed.data_ptr(), memory, rows]


def test_rows_for_flashinfer() -> None:
    rows = np.array([[5, 0, 1], [2, 15, 1], [7, 16, 20]], dtype=np.int32)
    q_indptr, kv_indptr, lengths, last_page_len, slots = HostRows.of(rows, 16, before=4)
    assert q_indptr.tolist() == [0, 4, 5, 6, 26]
    assert kv_indptr.tolist() == [0, 0, 1, 2, 5]
    assert lengths.tolist() == [0, 1, 16, 36]
    assert last_page_len.tolist() == [0, 1, 16, 4]
    assert slots.tolist() == [0, 5, 2, 7]


def test_padding_rows_have_no_keys() -> None:
    rows = np.array([[5, 3, 1]], dtype=np.int32)
    padded = HostRows.of(rows, 4, padded_rows=3, padding_tokens=1)
    assert padded.q_indptr.tolist() == [0, 0, 1, 2, 3]
    assert padded.kv_indptr.tolist() == [0, 0, 1, 1, 1]
    assert padded.lengths.tolist() == [0, 4, 0, 0]
    empty = HostRows.of(np.zeros((0, 3), dtype=np.int32), 4, padded_rows=2)
    assert empty.q_indptr.tolist() == [0, 0, 0, 0]
    real = padded.without_first()
    assert real.q_indptr.tolist() == [0, 1, 2, 3]
    assert real.lengths.tolist() == [4, 0, 0]


def test_a_staging_buffer_is_not_written_while_it_is_copied() -> None:
    staging = Staging(CPU)
    busy: set[int] = set()
    first = staging.take(100)
    first.is_free = lambda: id(first) not in busy  # type: ignore[method-assign]
    busy.add(id(first))
    second = staging.take(kernels._PLAN_BYTES << 10)
    assert second is not first
    assert len(second.memory) >= kernels._PLAN_BYTES << 10
    second.is_free = lambda: id(second) not in busy  # type: ignore[method-assign]
    busy = {id(second)}
    third = staging.take(100)
    assert third is first  # the oldest
    first.is_free = lambda: True  # type: ignore[method-assign]
    assert staging.take(100) not in (first, second)  # the oldest is still being copied


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        (Shape(2, 5000), True),  # FlashInfer decides, as it sees the rows
        (Shape(2, 1, captured=True, full=True), True),
        (Shape(33, 32, captured=True, full=True), True),
        (Shape(34, 33, captured=True, full=True), False),  # 33 rows fill the GPU
        (Shape(257, 256, captured=True, full=True), False),
        (Shape(257, 256, captured=True), True),  # few of these rows may be there
        (Shape(33, 512, captured=True), True),
        (Shape(257, 8192, captured=True), False),  # 1 GiB of partial results
    ],
)
def test_rows_are_split_where_it_helps_and_fits(shape: Shape, splits: bool) -> None:
    spec = AttentionSpec(0, 32, 8, 128, 1.0)
    partial = torch.empty(256 << 20, dtype=torch.uint8)
    place = Place(torch.bfloat16, 16, 132, False, partial, Staging(CPU))
    assert PrefillKernel("fa2", spec, place, None).splits(shape) == splits


def test_the_page_list_is_of_the_step_that_runs() -> None:
    """Pages may be added between the plan and the replay."""
    world = World([(PAGE_SIZE - 1, 1)], specs())
    backend = make_backend(world)
    plan = backend.graph_plan(graph_rows(world, 1, 1, mixed=False), world.table)
    slot = int(world.rows[0, 0])
    pages = world.table[slot].clone()
    world.table[slot, 0] = (pages[0] + 1) % (SLOTS * MAX_PAGES)
    backend.before_replay(plan, world.rows)
    world.table[slot] = pages
    qkv = world.qkv(world.rows)
    expected = world.run(world.dense, qkv)
    answer = run_padded(world, backend, plan, qkv, 1)
    torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)
