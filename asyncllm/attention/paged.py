"""Attention of a step's rows over the paged KV cache, on kernels that need no plan.

Decode rows (one new token) and longer rows have kernels of their own. Both read on the device what
their rows are, so a plan is a few small tensors: uploaded for a step that is launched kernel by
kernel, or read anew by each launch of a CUDA graph.

In a mixed step the two kernels overlap: decode rows keep memory busy, longer rows the tensor cores
of as many multiprocessors as they have tiles. On an H200, 130 rows of 650 tokens and 155 new tokens
take 105 us of a layer, 132 one after the other (docs/kernels.md). A second stream in the graph
takes the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import ForwardBatch, GraphRows, KVPages, count_decode_rows
from asyncllm.kernels.attention import (
    decode_attention,
    decode_heads,
    encode_heads,
    ordered_decode_attention,
    ordered_prefill_attention,
    prefill_attention,
)
from asyncllm.kernels.types import AttentionSpec, DecodeRows, HeadEncoding, PrefillRows
from asyncllm.kernels.upload import Upload, upload_aligned


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows of one token each, which come first in the step.

    Attributes:
        slots, lengths: integers [rows]; positions to attend to, the row's own included. Length 0:
            this token does not belong to a decode row.
    """

    slots: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step's rows by kernel. ``apart``: see ``GraphRows``."""

    block_table: Tensor
    decodes: Decodes | None
    extends: PrefillRows | None
    apart: bool = False


class PagedBackend:
    """``AttentionBackend``, and the one for CUDA graphs, on the kernels of ``asyncllm.kernels``.

    Nothing here waits for the device.

    Args:
        kv: the pages.
        upload: to where the pages are.
    """

    plans_on_host = False

    def __init__(self, kv: KVPages, upload: Upload) -> None:
        self._kv = kv
        self._upload = upload

    def plan(self, rows: np.ndarray, block_table: Tensor) -> PagedPlan:
        """See ``AttentionBackend.plan``; ``rows`` must not be empty."""
        slots, starts, q_lens = rows.T
        count = count_decode_rows(rows)
        offsets = np.concatenate([[0], q_lens.cumsum()])
        parts = (slots[:count], starts[:count] + 1, slots[count:], starts[count:], offsets[count:])
        on_device = upload_aligned(parts, np.int32, self._upload)
        decodes = Decodes(*on_device[:2]) if count else None
        if count == len(rows):
            return PagedPlan(block_table, decodes, None)
        return PagedPlan(block_table, decodes, PrefillRows(*on_device[2:]))

    def graph_plan(self, rows: GraphRows, block_table: Tensor) -> PagedPlan:
        """See ``GraphBackend.graph_plan``.

        Which rows are decode rows differs from replay to replay, so each kernel gets all rows, with
        the other kernel's rows as padding.
        """
        decodes = Decodes(rows.slots, rows.decode_lengths)
        return PagedPlan(block_table, decodes, rows.prefill, rows.apart)

    def before_replay(self, plan: PagedPlan, rows: np.ndarray) -> None:
        """See ``GraphBackend.before_replay``: the kernels read all they need on the device."""

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``AttentionBackend.forward``."""
        plan: PagedPlan = batch.plan
        keys, values = self._kv.layer(spec.kv_layer)
        scales = self._kv.scales(spec.kv_layer)
        table, decodes, extends = plan.block_table, plan.decodes, plan.extends
        if extends is None:
            assert decodes is not None
            rows = DecodeRows(keys, values, table, decodes.slots, decodes.lengths, scales)
            where = batch.positions, batch.slot_mapping
            if not plan.apart:
                return decode_heads(qkv, encoding, *where, rows, spec)
            q = encode_heads(qkv, spec, encoding, batch.positions, keys, values, where[1], scales)
            # The result is made by a kernel that waits until all K and V are written.
            return decode_attention(q, rows, spec, sinks=encoding.sinks).flatten(1)
        pages = keys, values, batch.slot_mapping, scales
        q = encode_heads(qkv, spec, encoding, batch.positions, *pages)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        count = 0 if decodes is None else min(len(decodes.slots), len(q))
        sinks = encoding.sinks
        of_step = q, keys, values, table, extends, spec
        prefill_attention(*of_step, scales=scales, sinks=sinks, out=out)
        if decodes is not None:
            slots, lengths = decodes.slots[:count], decodes.lengths[:count]
            rows = DecodeRows(keys, values, table, slots, lengths, scales)
            decoding = q[:count], rows, spec
            decode_attention(*decoding, sinks=sinks, out=out[:count], overlaps_previous=True)
        return out.flatten(1)

    def forward_logit_rows(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``LogitRowsBackend``: the last tokens of rows attend as decode rows do."""
        assert batch.logit_rows is not None
        keys, values = self._kv.layer(spec.kv_layer)
        scales = self._kv.scales(spec.kv_layer)
        rows = DecodeRows(keys, values, batch.plan.block_table, *batch.logit_rows, scales)
        if batch.sample_rows is None:
            return decode_heads(qkv, encoding, batch.positions, batch.slot_mapping, rows, spec)
        pages = keys, values, batch.slot_mapping, scales
        q = encode_heads(qkv, spec, encoding, batch.positions, *pages)
        # The decode kernel reads K and V of earlier tokens without waiting for the previous kernel.
        # Here that is the selection of rows, which has waited itself.
        return decode_attention(batch.sampling(q), rows, spec, sinks=encoding.sinks).flatten(1)


class OrderedBackend(PagedBackend):
    """A backend on kernels of which each token has the same bits in any step.

    K and V of all tokens are written before any token attends.
    """

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``AttentionBackend.forward``."""
        plan: PagedPlan = batch.plan
        keys, values = self._kv.layer(spec.kv_layer)
        scales = self._kv.scales(spec.kv_layer)
        table, decodes, extends = plan.block_table, plan.decodes, plan.extends
        pages = keys, values, batch.slot_mapping, scales
        q = encode_heads(qkv, spec, encoding, batch.positions, *pages)
        out = None
        if extends is not None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            args = q, keys, values, table, extends, spec
            ordered_prefill_attention(*args, scales=scales, sinks=encoding.sinks, out=out)
        if decodes is not None:
            count = min(len(decodes.slots), len(q))
            slots, lengths = decodes.slots[:count], decodes.lengths[:count]
            rows = DecodeRows(keys, values, table, slots, lengths, scales)
            part = None if out is None else out[:count]
            done = ordered_decode_attention(q[:count], rows, spec, sinks=encoding.sinks, out=part)
            out = done if out is None else out
        assert out is not None, "a step has rows"
        return out.flatten(1)

    def forward_logit_rows(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``LogitRowsBackend``."""
        assert batch.logit_rows is not None
        keys, values = self._kv.layer(spec.kv_layer)
        scales = self._kv.scales(spec.kv_layer)
        rows = DecodeRows(keys, values, batch.plan.block_table, *batch.logit_rows, scales)
        pages = keys, values, batch.slot_mapping, scales
        q = encode_heads(qkv, spec, encoding, batch.positions, *pages)
        q = batch.sampling(q)
        return ordered_decode_attention(q, rows, spec, sinks=encoding.sinks).flatten(1)
