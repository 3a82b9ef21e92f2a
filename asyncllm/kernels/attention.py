"""Attention over the paged KV cache, and what happens to heads before it.

Shapes: keys and values are pages [num_pages, page_size, num_kv_heads, head_dim], contiguous; the
block table is int32 [slots, max_pages], the page numbers of each slot; a slot mapping is int64
[tokens], where each token's K and V go in the flattened pages, -1 for nowhere.

Pages have the type of queries, or 8 bits (e4m3). Then a layer has scales, float32 [2,
num_kv_heads], of keys and of values, and a number is what is in its page times the scale of its
head. What a kernel has just computed counts as it is kept, so that an answer is the same whether
K and V were computed in this step or earlier. An infinite or too large number becomes the largest.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.support import in_triton
from asyncllm.kernels.types import (
    FP8_MAX,
    AttentionSpec,
    DecodeRows,
    HeadEncoding,
    Norm,
    PrefillRows,
)


@in_triton("qk_norm_rope")
def encode_heads(
    qkv: Tensor,
    spec: AttentionSpec,
    encoding: HeadEncoding,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate queries in place, and keys and values on the way to their pages.

    With ``spec.shares`` there are queries only, as K and V are in the pages already.

    Args:
        qkv: [tokens, projected_size]; see ``AttentionSpec``.
        positions: int64 [tokens].

    Returns:
        The queries, a view of qkv: [tokens, num_heads, head_dim].
    """
    q, k, v = spec.split_heads(qkv)
    if spec.shares is None:
        if encoding.normalizes_values:
            assert encoding.k_norm is not None
            v = F.rms_norm(v, v.shape[-1:], eps=encoding.k_norm.eps)
        k = _encoded(k, encoding.k_norm, spec, encoding.rope, positions)
        _write(keys, to_pages(k, None if scales is None else scales[0]), slot_mapping)
        _write(values, to_pages(v, None if scales is None else scales[1]), slot_mapping)
    return q.copy_(_encoded(q, encoding.q_norm, spec, encoding.rope, positions))


@in_triton("attention.prefill")
def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: PrefillRows,
    spec: AttentionSpec,
    *,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend the new tokens of each row to its sequence in the paged cache, themselves included.

    Tokens before the first row are assumed to be decode rows whose attention is launched next and
    overlaps this launch: see ``decode_attention``.

    Args:
        q: [tokens, num_heads, head_dim], the last dimension contiguous.
        keys, values: must already hold the new tokens.
        sinks: [num_heads], in layers that have them.
        out: where to write the result, contiguous; by default a new tensor.

    Returns:
        [tokens, num_heads, head_dim]; tokens of no row are left as they were.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    bounds = rows.q_offsets.tolist()
    for i, (slot, start) in enumerate(zip(rows.slots.tolist(), rows.starts.tolist(), strict=True)):
        row = slice(bounds[i], bounds[i + 1])
        if row.start < row.stop:
            pages = keys, values, block_table[slot]
            out[row] = _attend(q[row], start, *pages, spec, sinks, scales)
    return out


@in_triton("attention.decode")
def decode_attention(
    q: Tensor,
    rows: DecodeRows,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    overlaps_previous: bool = False,
) -> Tensor:
    """Attend one query of each row to the row's pages.

    The host reads no tensor, and the launch depends on shapes alone: captured in a CUDA graph, it
    serves rows of any lengths. Launches of one thread must follow each other on a stream.

    Slots, lengths, the block table, and K and V of all tokens but the newest of each row may be
    read before the kernels just before have finished (programmatic dependent launch). So whatever
    wrote them must be followed by a kernel that waits for all before it, such as any of PyTorch's.

    Args:
        q: [rows, num_heads, head_dim], the last dimension contiguous.
        rows: the result of padding is 0.
        sinks: [num_heads], in layers that have them.
        out: where to write the result, contiguous; by default a new tensor.
        overlaps_previous: overlap the kernel launched just before, whose results must not be
            needed here, and which must have waited for our inputs before it let this one start, as
            ``prefill_attention`` does. Results of padding are left as they were.

    Returns:
        [rows, num_heads, head_dim], contiguous.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not overlaps_previous:
        out.zero_()
    keys, values, table, slots, lengths, scales = rows
    for i, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length > 0:
            row = slice(i, i + 1)
            pages = keys, values, table[slot]
            out[row] = _attend(q[row], length - 1, *pages, spec, sinks, scales)
    return out


@in_triton("attention.decode")
def decode_heads(
    qkv: Tensor,
    encoding: HeadEncoding,
    positions: Tensor,
    slot_mapping: Tensor,
    rows: DecodeRows,
    spec: AttentionSpec,
) -> Tensor:
    """``encode_heads``, then ``decode_attention``; in one kernel if that is faster.

    Positions and the slot mapping may be read as early as slots and lengths.

    Args:
        qkv: [rows, projected_size]; the heads of the token at position ``lengths - 1`` of each row.
            May be overwritten.
        positions: int [rows]; the rotary positions.

    Returns:
        [rows, num_heads * head_dim].
    """
    at = positions, rows.keys, rows.values, slot_mapping, rows.scales
    q = encode_heads.reference(qkv.clone(), spec, encoding, *at)
    return decode_attention.reference(q, rows, spec, sinks=encoding.sinks).flatten(1)


@in_triton("attention.ordered")
def ordered_prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: PrefillRows,
    spec: AttentionSpec,
    *,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``prefill_attention``, of which each token has the same bits in any row, and alone."""
    args = q, keys, values, block_table, rows, spec
    return prefill_attention.reference(*args, scales=scales, sinks=sinks, out=out)


@in_triton("attention.ordered")
def ordered_decode_attention(
    q: Tensor,
    rows: DecodeRows,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``decode_attention``, with the bits of ``ordered_prefill_attention``.

    Args:
        out: of these, results of padding are left as they were.
    """
    overlaps = out is not None
    args = q, rows, spec
    return decode_attention.reference(*args, sinks=sinks, out=out, overlaps_previous=overlaps)


@in_triton("attention.sinks")
def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Turn attention without sinks into attention with them, in place.

    A sink takes its share of the softmax's weight and has no value, so all that is left to do is to
    scale the result by the share of the other keys, sigmoid(log-sum-exp - sink).

    Args:
        out: [tokens, num_heads, head_dim], contiguous.
        lse: float32 [tokens, num_heads], contiguous: log2 of the sum of exp(score) over all keys.
            For tokens of no row it may hold anything: no factor is NaN or above 1.
        sinks: [num_heads].
    """
    kept = torch.sigmoid(lse * math.log(2) - sinks.to(lse.dtype)).nan_to_num(1.0)
    out.mul_(kept.unsqueeze(-1))


def _encoded(
    heads: Tensor, norm: Norm | None, spec: AttentionSpec, rope: Tensor | None, positions: Tensor
) -> Tensor:
    """Heads, normalised and rotated."""
    normed = heads if norm is None else rms_norm.reference(heads, norm)
    if rope is None:
        return normed
    return _rotate(normed, rope.index_select(0, positions), spec.pair_distance)


def _rotate(x: Tensor, angles: Tensor, distance: int | None) -> Tensor:
    """Rotate pairs of elements of each head; x [tokens, heads, head_dim]."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    start = half if distance is None else distance
    first, second = x[..., :half], x[..., start : start + half]
    between, rest = x[..., half:start], x[..., start + half :]
    turned = first * cos - second * sin, second * cos + first * sin
    first, second = (part.to(x.dtype) for part in turned)
    return torch.cat((first, between, second, rest), dim=-1)


def to_pages(heads: Tensor, scale: Tensor | None) -> Tensor:
    """Heads [tokens, heads, head_dim] as pages keep them; ``scale`` is float32 [heads] or None."""
    if scale is None:
        return heads
    numbers = heads.float() * scale.reciprocal()[:, None]
    return numbers.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def from_pages(pages: Tensor, scale: Tensor | None, dtype: torch.dtype, cells: Tensor) -> Tensor:
    """Heads in some cells of the flattened pages, as numbers of a type: [cells, heads, head_dim].

    Args:
        scale: that of ``to_pages``.
    """
    stored = pages.flatten(0, 1).index_select(0, cells)
    return stored.to(dtype) if scale is None else (stored.float() * scale[:, None]).to(dtype)


def _write(pages: Tensor, heads: Tensor, slot_mapping: Tensor) -> None:
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        heads, slot_mapping = heads[kept], slot_mapping[kept]
    if pages.itemsize == 1:  # torch copies no e4m3 by index
        pages, heads = pages.view(torch.uint8), heads.view(torch.uint8)
    pages.flatten(0, 1).index_copy_(0, slot_mapping, heads)


def _attend(
    q: Tensor,
    start: int,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    """Attend queries [tokens, num_heads, head_dim] at positions from ``start`` on to a sequence.

    Args:
        pages: int [max_pages]; the sequence's page numbers.
    """
    page_size = keys.shape[1]
    compute = torch.promote_types(q.dtype, torch.float32)
    first = 0 if spec.window is None else max(start + 1 - spec.window, 0)
    key_at = torch.arange(first, start + len(q), device=q.device)
    query_at = torch.arange(start, start + len(q), device=q.device)[:, None]
    cells = pages[key_at // page_size].long() * page_size + key_at % page_size
    of_k, of_v = (None, None) if scales is None else scales
    k, v = (
        from_pages(tokens, scale, compute, cells).repeat_interleave(spec.group, dim=1)
        for tokens, scale in ((keys, of_k), (values, of_v))
    )
    scores = torch.einsum("qhd,khd->hqk", q.to(compute), k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    hidden = key_at > query_at
    if spec.window is not None:
        hidden |= key_at <= query_at - spec.window
    sinks = None if sinks is None else sinks[:, None, None]
    weights = softmax_with_sinks(scores.masked_fill(hidden, -torch.inf), sinks)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [..., keys], in which sinks take part like one more key.

    Args:
        sinks: of a shape that expands to [..., 1].
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
