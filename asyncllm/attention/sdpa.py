"""Paged attention in plain torch, for CPUs and for GPUs without a better backend.

K and V are gathered by token, not by page. Both take the same time (measured), but padding of a row
can then repeat the row's own last token: other sequences' leftovers in a page, NaN included, are
never read, and a sliding window reads exactly its tokens.

Decode rows are attended in groups of similar length. On a CPU, the K and V of a group fit into the
L2 cache; on a GPU, groups are large, for few launches. Query heads that share a K/V head are
rows of one matmul: in float32 that takes half the time of ``enable_gqa``. The plan is made with
numpy on the host, and the device only looks pages up in the block table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.attention.base import ForwardBatch, KVPages
from asyncllm.kernels.attention import encode_heads, from_pages, softmax_with_sinks
from asyncllm.kernels.types import AttentionSpec, HeadEncoding
from asyncllm.kernels.upload import upload

#: Ratio of the longest to the shortest row of a decode group.
MAX_PADDING = 1.5
#: Queries of a block; chunks that need a mask are cut into blocks, which read only what they see.
QUERY_BLOCK = 256


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows [begin, end) in sorted order, attended in one call.

    ``tokens`` is int32 [rows * length]; ``bias`` is 0 or -inf, [rows, 1, 1, length], or None when
    no row is padded.
    """

    begin: int
    end: int
    length: int
    tokens: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries [begin, end) of one row.

    They attend to the cached ``tokens``, int32 [length], under ``bias``, 0 or -inf, [end - begin,
    length]; or, if ``bias`` is None, causally to these, which are their own.
    """

    begin: int
    end: int
    tokens: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Reads:
    """The reads of a step's rows in layers of one kind.

    ``order`` is int64 [decode rows]: the tokens of decode rows in the order of groups; None if that
    is all tokens of the step in their own order.
    """

    order: Tensor | None
    groups: list[DecodeGroup]
    chunks: list[Chunk]


class SdpaPlan:
    """The rows of one step and their reads.

    Reads depend on a layer's window, and are computed for the first layer with that window. So the
    block table must not change (in stream order) between ``plan`` and the step's last ``forward``.

    Args:
        rows, block_table: see ``AttentionBackend.plan``.
        page_size: tokens of a page.
        group_tokens: tokens that one decode group gathers, at most, unless it is a single row.
    """

    def __init__(
        self, rows: np.ndarray, block_table: Tensor, page_size: int, group_tokens: int
    ) -> None:
        self._slots, self._starts, self._q_lens = rows.T
        self._ends = self._starts + self._q_lens
        self._tokens = self._q_lens.cumsum(dtype=np.int32) - self._q_lens
        self._table = block_table.reshape(-1)
        self._max_pages = block_table.shape[1]
        self._page_size = page_size
        self._group_tokens = group_tokens
        self._longest = int(self._ends.max())
        self._reads: dict[tuple[int, bool, torch.dtype], Reads] = {}

    def reads(self, window: int | None, fast: bool, dtype: torch.dtype) -> Reads:
        """The reads of layers with this window.

        Args:
            fast: a chunk without earlier tokens needs no mask.
            dtype: of the biases.
        """
        window = self._longest if window is None else min(window, self._longest)
        key = window, fast, dtype
        if key not in self._reads:
            order, groups = self._decode_reads(window, dtype)
            chunks = self._chunk_reads(window, fast, dtype)
            self._reads[key] = Reads(order, groups, chunks)
        return self._reads[key]

    def _decode_reads(
        self, window: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, list[DecodeGroup]]:
        """Sort the rows with one new token by length and cut them into groups."""
        rows = np.flatnonzero(self._q_lens == 1)
        if rows.size == 0:
            return None, []
        lengths = np.minimum(self._ends[rows], window)
        by_length = np.argsort(-lengths, kind="stable")
        rows, lengths = rows[by_length], lengths[by_length]
        cuts = self._cut(lengths.tolist())
        padded = np.repeat(lengths[cuts[:-1]], np.diff(cuts))
        ends = self._ends[rows]
        index = self._locate(self._slots[rows], ends - lengths, ends, padded)
        parts = index.split([(b - a) * int(lengths[a]) for a, b in pairwise(cuts)])
        biases = self._padding_biases(lengths, cuts, dtype)
        groups = [
            DecodeGroup(begin, end, int(lengths[begin]), part, bias)
            for (begin, end), part, bias in zip(pairwise(cuts), parts, biases, strict=True)
        ]
        tokens = self._tokens[rows]
        in_order = rows.size == self._slots.size and bool((tokens[1:] > tokens[:-1]).all())
        return None if in_order else self._upload(tokens).long(), groups

    def _padding_biases(
        self, lengths: np.ndarray, cuts: list[int], dtype: torch.dtype
    ) -> list[Tensor | None]:
        """For each group: None if its rows are equally long, else [rows, 1, 1, length]."""
        biases: list[Tensor | None] = []
        for begin, end in pairwise(cuts):
            length = int(lengths[begin])
            if lengths[end - 1] == length:
                biases.append(None)
                continue
            hidden = np.arange(_aligned(length)) >= lengths[begin:end, None]
            bias = self._upload(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(dtype)
            biases.append(bias[:, None, None, :length])
        return biases

    def _cut(self, lengths: list[int]) -> list[int]:
        """The starts of groups among rows sorted by falling length, and the number of rows."""
        cuts = [0]
        for i, length in enumerate(lengths):
            longest = lengths[cuts[-1]]
            rows = i - cuts[-1] + 1
            if i > cuts[-1] and (
                rows * longest > self._group_tokens or longest > MAX_PADDING * length
            ):
                cuts.append(i)
        return [*cuts, len(lengths)]

    def _chunk_reads(self, window: int, fast: bool, dtype: torch.dtype) -> list[Chunk]:
        """Cut rows with several new tokens into blocks of queries if they need a mask."""
        chunks: list[Chunk] = []
        for i in np.flatnonzero(self._q_lens > 1):
            token, start, end = int(self._tokens[i]), int(self._starts[i]), int(self._ends[i])
            # One index for the whole row; each block takes a slice of it.
            first = max(0, start + 1 - window)
            span = np.array([[self._slots[i]], [first], [end], [end - first]])
            index = self._locate(*span)
            if fast and start == 0 and end <= window:
                chunks.append(Chunk(token, token + end, index, None))
                continue
            for a in range(start, end, QUERY_BLOCK):
                b = min(a + QUERY_BLOCK, end)
                seen = max(0, a + 1 - window)
                bias = _causal_bias(a, b, seen, window, dtype, index.device)
                at = token + a - start
                chunks.append(Chunk(at, at + b - a, index[seen - first : b - first], bias))
        return chunks

    def _locate(
        self, slots: np.ndarray, first: np.ndarray, end: np.ndarray, count: np.ndarray
    ) -> Tensor:
        """Indices of positions in the flattened pages: int32 [sum(count)] on the device.

        For each i, count[i] positions of slot slots[i] from first[i] on. Positions from end[i] on
        are padding, and become end[i] - 1, so that no other sequence's data is read.
        """
        # A stretch of one arange over all spans, shifted, gives the positions of span i.
        shift = (first - (count.cumsum(dtype=np.int32) - count)).repeat(count)
        last = (end - 1).repeat(count)
        position = np.minimum(np.arange(shift.size, dtype=np.int32) + shift, last)
        column = position // self._page_size
        cell = (slots * self._max_pages).repeat(count) + column
        index = self._table.index_select(0, self._upload(cell))
        index.mul_(self._page_size).add_(self._upload(position - column * self._page_size))
        return index

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self._table.device)


def _causal_bias(
    start: int, end: int, first: int, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[end - start, end - first]: 0 where query start + i sees key first + j, else -inf."""
    shape = (end - start, _aligned(end - first))
    hidden = torch.full(shape, -torch.inf, dtype=dtype, device=device)
    bias = hidden.triu(start - first + 1)
    if end - first > window:
        bias += hidden.tril(start - first - window)
    return bias[:, : end - first]


def _aligned(length: int) -> int:
    """The row length of a bias in memory: GPU kernels load 16 bytes at aligned addresses."""
    return -(-length // 16) * 16


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
        keys, _ = kv.layer(kv.first_layer)
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
        scales = self._kv.scales(spec.kv_layer)
        q = encode_heads(qkv, spec, encoding, batch.positions, *pages, batch.slot_mapping, scales)
        of_heads = (None, None) if scales is None else scales
        keys, values = (
            partial(from_pages, *of, q.dtype) for of in zip(pages, of_heads, strict=True)
        )
        plan: SdpaPlan = batch.plan
        is_fused = spec.softcap is None and encoding.sinks is None
        reads = plan.reads(spec.window, is_fused, q.dtype)
        out = q.new_empty(q.shape)
        if reads.groups:
            _decode(q, keys, values, out, spec, encoding.sinks, reads)
        for chunk in reads.chunks:
            span = slice(chunk.begin, chunk.end)
            seen_k, seen_v = keys(chunk.tokens), values(chunk.tokens)
            _prefill(q[span], seen_k, seen_v, out[span], spec, encoding.sinks, chunk.bias)
        return out.flatten(1)


def _decode(
    q: Tensor,
    keys: Callable[[Tensor], Tensor],
    values: Callable[[Tensor], Tensor],
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
        group_k = keys(group.tokens).view(shape).transpose(1, 2)
        group_v = values(group.tokens).view(shape).transpose(1, 2)
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
    """Attend one chunk of a row, causally if it has no bias ([queries, length]).

    K/V heads become the batch, and the query heads that share one become its heads, with K and V
    expanded without a copy. Unlike ``enable_gqa``, this works with a mask on GPUs.
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
