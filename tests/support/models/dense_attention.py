"""Attention at its plainest: dense keys and values per sequence, a masked softmax in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import ForwardBatch, StepStates
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.kernels.attention import encode_heads
from asyncllm.kernels.types import AttentionSpec, HeadEncoding
from asyncllm.models.base import CausalLM


class DenseBackend:
    """An ``AttentionBackend`` without pages, to check models and backends against."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.pool: StatePool | None = None

    def states(self, model: CausalLM, rows: np.ndarray) -> StepStates | None:
        """The recurrent states of a step of (slot, start, q_len) rows."""
        if self.pool is None:
            dtype = next(model.parameters()).dtype
            self.pool = StatePool(model.states, 8, dtype, "cpu")
        return self.pool.of_step(rows, 1 + rows[:, 0], torch.from_numpy)

    def plan(self, rows: np.ndarray, block_table: Tensor) -> list[tuple[int, int, int]]:
        return [(int(slot), int(start), int(q_len)) for slot, start, q_len in rows]

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        k, v = (qkv.new_empty(len(qkv), 1, spec.num_kv_heads, spec.head_dim) for _ in "kv")
        everywhere = torch.arange(len(qkv))
        q = encode_heads(qkv, spec, encoding, batch.positions, k, v, everywhere)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        first = 0
        for slot, start, q_len in batch.plan:
            here = slice(first, first + q_len)
            if spec.shares is None:
                self._extend((spec.layer, slot), start, k[here, 0], v[here, 0])
            keys, values = self._cache[spec.kv_layer, slot]
            out[here] = attend(q[here], keys, values, spec, start, encoding.sinks)
            first += q_len
        return out.flatten(1)

    def _extend(self, key: tuple[int, int], start: int, k: Tensor, v: Tensor) -> None:
        if start:
            old_k, old_v = self._cache[key]
            k, v = torch.cat((old_k[:start], k)), torch.cat((old_v[:start], v))
        self._cache[key] = k, v


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, start: int, sinks: Tensor | None = None
) -> Tensor:
    """Attention of queries at positions from ``start`` over all keys: [n, heads, head_dim]."""
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    query_at = torch.arange(start, start + len(q))[:, None]
    key_at = torch.arange(len(k))[None, :]
    visible = key_at <= query_at
    if spec.window is not None:
        visible &= key_at > query_at - spec.window
    scores.masked_fill_(~visible, -torch.inf)
    if spec.has_sinks:
        assert sinks is not None
        sink = sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def step(
    model: CausalLM, backend: DenseBackend, rows: list[tuple[int, int, list[int]]]
) -> list[Tensor]:
    """Run (slot, start, token ids) rows in one step; logits of all tokens, row by row."""
    tokens = [token for _, _, ids in rows for token in ids]
    positions = [at for _, start, ids in rows for at in range(start, start + len(ids))]
    shape = np.array([(slot, start, len(ids)) for slot, start, ids in rows], dtype=np.int32)
    batch = ForwardBatch(
        input_ids=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slot_mapping=torch.empty(0),
        sample_rows=torch.arange(len(tokens)),
        backend=backend,
        plan=backend.plan(shape, torch.empty(0)),
        states=backend.states(model, shape),
    )
    with torch.inference_mode():
        logits = model.logits(model(batch))
    return list(torch.split(logits, [len(ids) for _, _, ids in rows]))
