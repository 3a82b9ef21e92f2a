"""Steps padded to a size compute what they compute as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncllm.attention.base import AttentionBackend, ForwardBatch, GraphRows
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.executor.device import CpuDevice
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.executor.step.inputs import StepRows, upload_step
from asyncllm.executor.step.padded_steps import PaddedSteps, row_buckets
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.kernels.types import AttentionSpec, HeadEncoding
from asyncllm.models.base import CausalLM
from asyncllm.models.loading.loader import load_model
from asyncllm.models.spec import read_spec
from asyncllm.wire.messages import Admit, RowParams

PAGE_SIZE, NUM_PAGES, SLOTS, MAX_PAGES = 4, 64, 6, 10
PARAMS = RowParams(temperature=0.0)


class TensorPlanned(SdpaBackend):
    """A ``GraphBackend`` that looks at its tensors only when it is run, as a graph does."""

    plans_on_host = True

    def __init__(self, pool: KVPool, table: SlotTable):
        super().__init__(pool)
        self._table = table
        self.prepared = np.empty((0, 3), dtype=np.int32)

    def graph_plan(self, rows: GraphRows, block_table: Tensor) -> GraphRows:
        return rows

    def before_replay(self, plan: GraphRows, rows: np.ndarray) -> None:
        self.prepared = rows

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        planned: GraphRows = batch.plan
        assert planned.num_tokens == len(qkv)
        is_decode = planned.decode_lengths > 0
        starts, q_lens = planned.decode_lengths - 1, is_decode.int()
        if planned.prefill is not None:
            new = planned.prefill.q_offsets.diff()
            assert not new[is_decode].any()
            starts, q_lens = torch.where(is_decode, starts, planned.prefill.starts), q_lens + new
        rows = torch.stack([planned.slots, starts, q_lens], dim=1)[q_lens > 0].numpy()
        assert np.array_equal(rows, self.prepared)
        count = int(q_lens.sum())
        out = qkv.new_zeros(len(qkv), spec.num_heads * spec.head_dim)
        if count == 0:
            return out
        inner = ForwardBatch(
            batch.input_ids[:count],
            batch.positions[:count],
            batch.slot_mapping[:count],
            None,
            self,
            self.plan(rows.astype(np.int32), self._table.block_table),
        )
        out[:count] = super().forward(qkv[:count], spec, encoding, inner)
        return out


@pytest.fixture(scope="module", params=["qwen3", "gemma4", "qwen3_next"])
def model(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> CausalLM:
    folder = folder_of(request.param)
    return load_model(folder, read_spec(folder), torch.float32, "cpu", max_length=40)


def prepared(model: CausalLM) -> tuple[SlotTable, KVPool, StatePool]:
    """Slots 0..5 with random pages, tokens known up to position 20, and random KV and states."""
    generator = torch.Generator().manual_seed(3)
    device = CpuDevice()
    pool = KVPool(model.attention_specs, NUM_PAGES, PAGE_SIZE, torch.float32, "cpu")
    pool.storage.normal_(generator=generator)
    table = SlotTable(SLOTS, MAX_PAGES, device, max_drafts=3)
    pages = torch.randperm(NUM_PAGES, generator=generator)[: SLOTS * MAX_PAGES]
    table.block_table[:SLOTS, :MAX_PAGES] = pages.view(SLOTS, MAX_PAGES).int()
    table.last_token[:SLOTS] = torch.randint(4, 300, (SLOTS,), generator=generator)
    for slot in range(SLOTS):
        known = np.random.default_rng(slot).integers(4, 300, 20).astype(np.int32)
        table.admit(Admit(slot, known.tobytes(), 20, PARAMS))
    states = StatePool(model.states, SLOTS, torch.float32, "cpu")
    states.inputs.normal_(generator=generator)
    states.matrices.normal_(0.0, 0.1, generator=generator)
    return table, pool, states


def whole_step(
    step: StepRows, table: SlotTable, backend: AttentionBackend, states: StatePool
) -> ForwardBatch:
    """A step all of whose tokens yield logits."""
    tokens = upload_step(step, table, PAGE_SIZE, CpuDevice()).tokens
    of_states = states.of_step(step.rows, step.state_slots, torch.from_numpy)
    plan = backend.plan(step.rows, table.block_table)
    return ForwardBatch(*tokens, None, backend, plan, states=of_states)


decode = st.tuples(st.integers(20, 38), st.just(1))
chunk = st.integers(0, 19).flatmap(
    lambda start: st.tuples(st.just(start), st.integers(1, 20 - start))
)


@given(
    spans=st.lists(st.one_of(decode, chunk), min_size=1, max_size=SLOTS),
    order=st.permutations(range(SLOTS)),
)
def test_a_padded_step_is_the_same_step(
    model: CausalLM, spans: list[tuple[int, int]], order: list[int]
) -> None:
    rows = np.array(
        [(slot, *span) for slot, span in zip(order, spans, strict=False)], dtype=np.int32
    )
    with torch.inference_mode():
        table, pool, states = prepared(model)
        step = StepRows.of(rows, table, 1 + rows[:, 0])
        batch = whole_step(step, table, SdpaBackend(pool), states)
        last = torch.from_numpy(rows[:, 2].cumsum() - 1)
        expected = model.logits(model(batch).index_select(0, last))
        written = pool.storage.clone(), states.inputs[1:].clone(), states.matrices[1:].clone()

        table, pool, states = prepared(model)
        backend = TensorPlanned(pool, table)
        padded = PaddedSteps(model, backend, states, table, PAGE_SIZE, SLOTS, 128)
        sizes = list(padded.sizes_of(step))
        assert sizes == sorted(sizes)
        size = sizes[0]
        assert size.mixed != step.each_samples_its_only_token
        flat = padded.pack(size, step)
        assert len(flat) == size.num_ints <= padded.max_ints
        on_device = torch.from_numpy(flat)
        planned = padded.plan(size, on_device)
        padded.before_replay(planned, step)
        logits, by_row, _ = padded.run(size, on_device, planned)
    assert logits.shape[0] == size.rows
    torch.testing.assert_close(logits[: len(rows)], expected, rtol=1e-5, atol=1e-5)
    kept = pool.storage, states.inputs[1:], states.matrices[1:]
    torch.testing.assert_close(kept, written, rtol=1e-5, atol=1e-5)
    assert by_row.slots[: len(rows)].tolist() == rows[:, 0].tolist()
    assert by_row.lengths[: len(rows)].tolist() == (rows[:, 1] + rows[:, 2]).tolist()
    assert by_row.lengths[len(rows) :].tolist() == [0] * (size.rows - len(rows))


@pytest.mark.parametrize(
    "backend", [SdpaBackend, lambda pool: PagedBackend(pool, torch.from_numpy)]
)
def test_scored_tokens_yield_logits_beside_those_that_sample(
    model: CausalLM, backend: Callable[[KVPool], AttentionBackend]
) -> None:
    with torch.inference_mode():
        table, pool, states = prepared(model)
        known = np.arange(10, 30, dtype=np.int32)
        table.admit(Admit(1, known.tobytes(), 20, PARAMS, prompt_logprobs=0))
        rows = np.array([(0, 25, 1), (1, 3, 17), (2, 5, 8)], dtype=np.int32)
        step = StepRows.of(rows, table, 1 + rows[:, 0])
        assert [len(row.targets) for row in step.scored] == [16]
        inputs = upload_step(step, table, PAGE_SIZE, CpuDevice())
        batch = whole_step(step, table, backend(pool), states)
        samples, logit_rows = inputs.sample_rows, inputs.logit_rows
        hidden = model(replace(batch, sample_rows=samples, logit_rows=logit_rows))
        _, _, states = prepared(model)
        everything = model(whole_step(step, table, batch.backend, states))
    expected = everything[[*range(1, 17), 0, 17]]
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_layers_that_only_read_keys_take_the_tokens_that_yield_logits(
    folder_of: Callable[[str], Path],
) -> None:
    folder = folder_of("gemma4")
    model = load_model(folder, read_spec(folder), torch.float32, "cpu", max_length=40)
    counts: list[int] = []

    class Counting(PagedBackend):
        def forward_logit_rows(self, qkv: Tensor, *args: Any) -> Tensor:
            counts.append(len(qkv))
            return super().forward_logit_rows(qkv, *args)

    rows = np.array([(0, 20, 1), (1, 3, 17), (2, 0, 8), (3, 19, 1)], dtype=np.int32)
    with torch.inference_mode():
        table, pool, _ = prepared(model)
        inputs = upload_step(StepRows.of(rows, table), table, PAGE_SIZE, CpuDevice())
        backend = Counting(pool, torch.from_numpy)
        samples, plan = inputs.sample_rows, backend.plan(rows, table.block_table)
        assert samples is not None
        expected = model(ForwardBatch(*inputs.tokens, samples, backend, plan))
        assert not counts
        hidden = model(ForwardBatch(*inputs.tokens, samples, backend, plan, inputs.logit_rows))
        assert counts == [27, 3, 3], "one layer writes keys of all tokens, two follow"
        nothing = model(ForwardBatch(*inputs.tokens, samples[:0], backend, plan))
        assert nothing.shape == (0, 64)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_padding_alone_writes_nothing(model: CausalLM) -> None:
    table, pool, states = prepared(model)
    before = pool.storage.clone(), states.inputs[1:].clone(), states.matrices[1:].clone()
    padded = PaddedSteps(model, TensorPlanned(pool, table), states, table, PAGE_SIZE, SLOTS, 128)
    with torch.inference_mode():
        for size in padded.decode_sizes + padded.mixed_sizes:
            flat = torch.from_numpy(padded.pack(size, None))
            planned = padded.plan(size, flat)
            padded.before_replay(planned, None)
            logits, by_row, _ = padded.run(size, flat, planned)
            assert logits.isfinite().all()
            assert (by_row.slots == table.dummy_slot).all()
    kept = pool.storage, states.inputs[1:], states.matrices[1:]
    torch.testing.assert_close(kept, before, rtol=0, atol=0)


def test_steps_too_large_for_every_size_have_none(model: CausalLM) -> None:
    table, pool, states = prepared(model)
    padded = PaddedSteps(model, TensorPlanned(pool, table), states, table, PAGE_SIZE, SLOTS, 128)
    rows = np.array([(slot, 0, 20) for slot in range(SLOTS)], dtype=np.int32)
    assert list(padded.sizes_of(StepRows.of(rows, table)))
    entries = np.zeros((3, 129), dtype=np.int32)
    whole = StepRows(
        rows[:1], rows[:1, 0], entries, np.array([0]), np.array([128]), rows[:1, 0], np.array([129])
    )
    assert not list(padded.sizes_of(whole))


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256, 1000])
def test_row_buckets(max_rows: int) -> None:
    buckets = row_buckets(max_rows)
    assert buckets == sorted(set(buckets))
    assert buckets[0] == 1
    assert buckets[-1] == max_rows
    for low, high in pairwise(buckets):
        assert high <= max(2 * low, low + 8) or high <= 1.34 * low
