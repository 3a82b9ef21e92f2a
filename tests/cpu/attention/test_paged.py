"""Attention over pages on our own kernels: plans of the host and of the device agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncllm.attention.base import GraphRows, LogitRows
from asyncllm.attention.paged import PagedBackend
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.kernels.types import AttentionSpec, PrefillRows
from tests.support.models.attending import UNCHANGED, attend, forward_batch
from tests.support.models.dense_attention import DenseBackend

HEADS, KV_HEADS, DIM, PAGE_SIZE, SLOTS, MAX_PAGES = 4, 2, 8, 4, 8, 12
CPU = torch.device("cpu")

row_lists = st.lists(
    st.tuples(st.integers(0, 20), st.one_of(st.just(1), st.integers(1, 9))),
    min_size=1,
    max_size=SLOTS - 1,
)


def specs(window: int | None = None, softcap: float | None = None) -> AttentionSpec:
    return AttentionSpec(0, HEADS, KV_HEADS, DIM, DIM**-0.5, window, softcap)


class World:
    """Sequences in shuffled pages that hold NaN wherever no row may look."""

    def __init__(self, lens: list[tuple[int, int]], spec: AttentionSpec):
        self.spec = spec
        slots = torch.randperm(SLOTS - 1)[: len(lens)].tolist()
        self.rows = np.array(
            [(s, *span) for s, span in zip(slots, lens, strict=True)], dtype=np.int32
        )
        self.pool = KVPool(1, SLOTS * MAX_PAGES, PAGE_SIZE, KV_HEADS, DIM, torch.float32, CPU)
        self.pool.storage.fill_(torch.nan)
        self.table = torch.randperm(SLOTS * MAX_PAGES).int().view(SLOTS, MAX_PAGES)
        self.dense = DenseBackend()
        before = np.array([(s, 0, n) for s, n, _ in self.rows if n > 0], dtype=np.int32)
        if len(before):
            # As earlier steps would have left it.
            qkv = self.qkv(before)
            attend(
                PagedBackend(self.pool, torch.from_numpy), qkv, spec, before, self.table, PAGE_SIZE
            )
            attend(self.dense, qkv, spec, before, self.table, PAGE_SIZE)

    def qkv(self, rows: np.ndarray) -> Tensor:
        return torch.randn(int(rows[:, 2].sum()), HEADS + 2 * KV_HEADS, DIM)

    def run(self, backend: Any, qkv: Tensor, plan: Any = None) -> Tensor:
        return attend(backend, qkv, self.spec, self.rows, self.table, PAGE_SIZE, plan=plan)


@given(lens=row_lists, window=st.sampled_from([None, 1, 5]), softcap=st.sampled_from([None, 2.0]))
def test_random_rows_match_dense_attention(
    lens: list[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    world = World(lens, specs(window, softcap))
    qkv = world.qkv(world.rows)
    expected = world.run(world.dense, qkv)
    answer = world.run(PagedBackend(world.pool, torch.from_numpy), qkv)
    torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)


@given(lens=row_lists, decodes=st.integers(0, SLOTS - 1), padding=st.integers(0, 5))
def test_plans_of_device_tensors_match_those_of_the_host(
    lens: list[tuple[int, int]], decodes: int, padding: int
) -> None:
    lens = [(start, 1) for start, _ in lens[:decodes]] + lens[decodes:]
    world = World(lens, specs())
    qkv = world.qkv(world.rows)
    backend = PagedBackend(world.pool, torch.from_numpy)
    expected = world.run(backend, qkv)

    slots, starts, q_lens = (torch.from_numpy(column.copy()) for column in world.rows.T)
    count = len(slots) + padding
    slots = torch.cat([slots, torch.full((padding,), SLOTS - 1, dtype=torch.int32)])
    starts = torch.cat([starts, torch.zeros(padding, dtype=torch.int32)])
    q_offsets = torch.zeros(count + 1, dtype=torch.int32)
    q_offsets[1:] = q_lens.sum()
    q_offsets[1 : len(q_lens) + 1] = q_lens.cumsum(0)
    single = int((q_lens == 1).cumprod(0).sum())
    lengths = torch.zeros(count, dtype=torch.int32)
    lengths[:single] = starts[:single] + 1
    prefill = PrefillRows(slots, starts, q_offsets.clamp(min=single))
    rows = GraphRows(len(qkv), slots, lengths, prefill)
    assert_same(world, backend, qkv, backend.graph_plan(rows, world.table), expected)
    if int(q_lens.max()) == 1:
        plan = backend.graph_plan(rows._replace(prefill=None), world.table)
        assert_same(world, backend, qkv, plan, expected, padding)


@given(lens=row_lists, every=st.integers(1, 3), window=st.sampled_from([None, 5]))
def test_the_last_tokens_of_rows_can_be_attended_alone(
    lens: list[tuple[int, int]], every: int, window: int | None
) -> None:
    world = World(lens, specs(window))
    qkv = world.qkv(world.rows)
    backend = PagedBackend(world.pool, torch.from_numpy)
    before = world.pool.storage.clone()
    expected = world.run(backend, qkv)
    written = world.pool.storage.clone()
    world.pool.storage.copy_(before)

    batch = forward_batch(backend, world.rows, world.table, PAGE_SIZE)
    slots, starts, q_lens = (torch.from_numpy(column[::every].copy()) for column in world.rows.T)
    batch.sample_rows = torch.from_numpy(world.rows[:, 2].cumsum() - 1)[::every]
    batch.logit_rows = LogitRows(slots, starts + q_lens)
    out = backend.forward_logit_rows(qkv.flatten(1).clone(), world.spec, UNCHANGED, batch)
    answer = out.view(-1, HEADS, DIM)
    torch.testing.assert_close(answer, expected[batch.sample_rows], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(world.pool.storage, written, equal_nan=True)


def assert_same(
    world: World,
    backend: PagedBackend,
    qkv: Tensor,
    plan: Any,
    expected: Tensor,
    padding: int = 3,
) -> None:
    """With tokens of no row behind those of the rows."""
    batch = forward_batch(backend, world.rows, world.table, PAGE_SIZE, plan=plan)
    batch.positions = torch.cat([batch.positions, torch.zeros(padding, dtype=torch.int64)])
    batch.slot_mapping = torch.cat([batch.slot_mapping, torch.full((padding,), -1)])
    padded = torch.cat([qkv, torch.full((padding, *qkv.shape[1:]), torch.nan)])

    out = backend.forward(padded.flatten(1), world.spec, UNCHANGED, batch)
    answer = out.view(-1, HEADS, DIM)[: len(qkv)]
    torch.testing.assert_close(answer, expected, atol=1e-6, rtol=1e-6)


def test_prompts_may_have_kernels_of_their_own() -> None:
    class Prompts:
        def plan(self, rows: np.ndarray, block_table: Tensor) -> Any:
            assert rows[:, 1:].tolist() == [[0, 5], [3, 1]]
            return self

        def run(self, q: Tensor, spec: AttentionSpec, out: Tensor) -> None:
            assert len(q) == len(out) == 6
            out.fill_(7.0)

    world = World([(4, 1), (0, 5), (3, 1)], specs())
    qkv = world.qkv(world.rows)
    answer = world.run(PagedBackend(world.pool, torch.from_numpy, Prompts()), qkv)
    assert bool((answer[1:] == 7.0).all())
    expected = world.run(world.dense, qkv)
    torch.testing.assert_close(answer[:1], expected[:1])


@pytest.mark.parametrize("window", [None, 3])
def test_warming_up_runs_each_kind_of_layer(window: int | None) -> None:
    pool = KVPool(2, 2, PAGE_SIZE, KV_HEADS, DIM, torch.float32, CPU)
    layers = [AttentionSpec(i, HEADS, KV_HEADS, DIM, 1.0, window if i else None) for i in range(2)]
    PagedBackend(pool, torch.from_numpy).warm_up(layers, torch.float32, CPU)
