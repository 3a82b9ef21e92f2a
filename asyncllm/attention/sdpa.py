"""Paged attention in plain torch, for CPUs and for GPUs without a better backend.

K and V are gathered by token, not by page. Both take the same time (measured), but padding of a row
can then repeat the row's own last token: other sequences' leftovers in a page, NaN included, are
never read, and a sliding window reads exactly its tokens.

Decode rows are attended in groups of similar length. On a CPU, the K and V of a group fit into the
L2 cache: 64 rows of 512 tokens at once take up to 3 times as long. On a GPU, groups are large,
which means few launches. Query heads that share a K/V head are rows of one matmul: in float32 that
takes half the time of ``enable_gqa``.

Microseconds of one layer's ``forward``, and of ``plan``, for 1 / 16 / 64 decode rows; 8 heads of
dimension 64, page size 16, one thread of a Xeon with AVX512:

| dtype, K/V heads | context 128            | context 512             | 50 to 600, mixed      |
|------------------|------------------------|-------------------------|-----------------------|
| float32, 2       | 32 / 305 / 1226        | 58 / 1166 / 4262        | 783 / 3204 (16, 64)   |
| float32, 4       | 37 / 556 / 2013        | 108 / 2184 / 10827      | 1362 / 5533           |
| bfloat16, 2      | 36 / 220 / 916         | 58 / 857 / 3496         | 648 / 2791            |
| bfloat16, 4      | 41 / 432 / 1623        | 90 / 1637 / 6350        | 1217 / 4714           |
| plan, per step   | 65 / 85 / 130          | 70 / 115 / 280          | 130 / 280             |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.attention.sdpa_plan import Reads, SdpaPlan
from asyncllm.kernels.attention import encode_heads, softmax_with_sinks

if TYPE_CHECKING:
    import numpy as np

    from asyncllm.attention.base import ForwardBatch, KVPages
    from asyncllm.kernels.types import AttentionSpec, HeadEncoding

#: Bytes of K that one decode group may gather.
CPU_GROUP_BYTES = 256 << 10
GPU_GROUP_BYTES = 64 << 20


class SdpaBackend:
    """``AttentionBackend`` on ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        kv: the pages; they live on the device that this backend computes on.
    """

    def __init__(self, kv: KVPages) -> None:
        self._kv = kv
        keys, _ = kv.layer(0)
        limit = CPU_GROUP_BYTES if keys.device.type == "cpu" else GPU_GROUP_BYTES
        token_bytes = keys.shape[2] * keys.shape[3] * keys.element_size()
        self._group_tokens = limit // token_bytes

    def plan(self, rows: np.ndarray, block_table: Tensor) -> SdpaPlan:
        """See ``AttentionBackend.plan``; ``rows`` must not be empty."""
        return SdpaPlan(rows, block_table, self._kv.page_size, self._group_tokens)

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``AttentionBackend.forward``."""
        pages = self._kv.layer(spec.kv_layer)
        q = encode_heads(qkv, spec, encoding, batch.positions, *pages, batch.slot_mapping)
        keys, values = (part.flatten(0, 1) for part in pages)
        plan: SdpaPlan = batch.plan
        is_fused = spec.softcap is None and encoding.sinks is None
        reads = plan.reads(spec.window, is_fused, q.dtype)
        out = q.new_empty(q.shape)
        if reads.groups:
            _decode(q, keys, values, out, spec, encoding.sinks, reads)
        for chunk in reads.chunks:
            span = slice(chunk.begin, chunk.end)
            seen_k = keys.index_select(0, chunk.tokens)
            seen_v = values.index_select(0, chunk.tokens)
            _prefill(q[span], seen_k, seen_v, out[span], spec, encoding.sinks, chunk.bias)
        return out.flatten(1)


def _decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    reads: Reads,
) -> None:
    """Attend decode rows, group by group; query heads of a K/V head become query rows."""
    heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
    order = reads.order
    sorted_q = q if order is None else q.index_select(0, order)
    sorted_out = out if order is None else torch.empty_like(sorted_q)
    for group in reads.groups:
        rows = group.end - group.begin
        shape = (rows, group.length, spec.num_kv_heads, spec.head_dim)
        group_k = keys.index_select(0, group.tokens).view(shape).transpose(1, 2)
        group_v = values.index_select(0, group.tokens).view(shape).transpose(1, 2)
        group_q = sorted_q[group.begin : group.end].view(rows, *heads)
        group_out = sorted_out[group.begin : group.end].view(rows, *heads)
        sink = None if sinks is None else sinks.view(spec.num_kv_heads, spec.group, 1)
        group_out.copy_(_attend(group_q, group_k, group_v, spec, sink, group.bias))
    if order is not None:
        out.index_copy_(0, order, sorted_out)


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Attend one chunk of a row, causally if it has no bias.

    K/V heads become the batch, and the query heads that share one become its heads, with K and V
    expanded without a copy. Unlike ``enable_gqa``, this works with a mask on GPUs.

    Args:
        q, out: [queries, num_heads, head_dim]; k, v: [length, num_kv_heads, head_dim].
        bias: None or [queries, length].
    """
    shared_by = spec.num_heads // spec.num_kv_heads
    shape = (len(q), spec.num_kv_heads, shared_by, spec.head_dim)
    q = q.view(shape).permute(1, 2, 0, 3)
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, shared_by, -1, -1)
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, shared_by, -1, -1)
    sink = None if sinks is None else sinks.view(spec.num_kv_heads, shared_by, 1, 1)
    result = _attend(q, k, v, spec, sink, bias, causal=bias is None)
    out.view(shape).copy_(result.permute(2, 0, 1, 3))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    bias: Tensor | None,
    causal: bool = False,
) -> Tensor:
    """Attention of [batch, heads, queries, head_dim]; the bias is added to the scores.

    ``sinks``: see ``softmax_with_sinks``.
    """
    if spec.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=causal, scale=spec.scale
        )
    # No fused kernel does that. In float32, as a bfloat16 score of 50 is off by up to 0.125.
    scores = torch.matmul(q.float(), k.float().transpose(-2, -1))
    scores.mul_(spec.scale / (spec.softcap or 1.0))
    if spec.softcap is not None:
        scores.tanh_().mul_(spec.softcap)
    if bias is not None:
        scores += bias
    return torch.matmul(softmax_with_sinks(scores, sinks), v.float()).to(q.dtype)
