"""Attention over pages on our own kernels: plans of the host and of the device agree."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncllm.attention.base import GraphRows, LogitRows
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.kernels.types import PrefillRows
from tests.support.models.attending import UNCHANGED, forward_batch
from tests.support.models.paged_world import DIM, HEADS, PAGE_SIZE, SLOTS, World, row_lists, specs


@given(
    lens=row_lists,
    window=st.sampled_from([None, 1, 5]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
)
def test_random_rows_match_dense_attention(
    lens: list[tuple[int, int]], window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    world = World(lens, specs(window, softcap, has_sinks))
    qkv = world.qkv(world.rows)
    expected = world.run(world.dense, qkv)
    for backend in (PagedBackend(world.pool, torch.from_numpy), SdpaBackend(world.pool)):
        answer = world.run(backend, qkv)
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
    world: World, backend: PagedBackend, qkv: Tensor, plan: Any, expected: Tensor, padding: int = 3
) -> None:
    """With tokens of no row behind those of the rows."""
    batch = forward_batch(backend, world.rows, world.table, PAGE_SIZE, plan=plan)
    batch.positions = torch.cat([batch.positions, torch.zeros(padding, dtype=torch.int64)])
    batch.slot_mapping = torch.cat([batch.slot_mapping, torch.full((padding,), -1)])
    padded = torch.cat([qkv, torch.full((padding, *qkv.shape[1:]), torch.nan)])

    out = backend.forward(padded.flatten(1), world.spec, UNCHANGED, batch)
    answer = out.view(-1, HEADS, DIM)[: len(qkv)]
    torch.testing.assert_close(answer, expected, atol=1e-6, rtol=1e-6)
