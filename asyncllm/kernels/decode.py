"""Attention of rows of one new token over the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncllm.kernels.native import has_triton_kernels
from asyncllm.kernels.qk_norm_rope import HeadEncoding, encode_heads_reference

if TYPE_CHECKING:
    from asyncllm.attention.base import AttentionSpec


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    spec: AttentionSpec,
    *,
    out: Tensor | None = None,
    beside: bool = False,
) -> Tensor:
    """Attend one query of each row to the row's pages.

    Nothing is read on the host, and the launch depends on shapes alone: captured in a CUDA graph,
    it serves rows of any lengths. Launches of one device must follow each other on a stream.

    Slots, lengths, the table, and the K and V of all but each row's newest token may be read before
    the kernels just before have finished. So a kernel that is launched to follow all others in
    full, such as any of PyTorch's, must come between this and whatever wrote them.

    Args:
        q: [rows, num_heads, head_dim]; strided, but for the last dimension.
        keys, values: [num_pages, page_size, num_kv_heads, head_dim], contiguous.
        block_table: int32 [slots, max_pages]; page numbers by slot.
        slots: int [rows].
        lengths: int [rows]; how many positions of the row are written, the query's own included.
            0 for padding, whose result is 0.
        out: where to write the result, contiguous; by default a new tensor.
        beside: run beside the kernel launched just before this, rather than after it. Nothing that
            it writes may be read here, and it must have waited for what is, before it let this one
            start, as ``extend_attention`` does. Results of padding are left as they are.

    Returns:
        [rows, num_heads, head_dim], contiguous.
    """
    rows = q, keys, values, block_table, slots, lengths, spec
    if has_triton_kernels(q):
        from asyncllm.kernels.triton.attention.decode import decode_attention as launch

        return launch(*rows, out=out, beside=beside)
    return decode_attention_reference(*rows, out=out, beside=beside)


def decode_heads(
    qkv: Tensor,
    encoding: HeadEncoding,
    positions: Tensor,
    written: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """``encode_heads``, then ``decode_attention``; in one kernel if that is faster.

    Of positions and written holds what ``decode_attention`` says of slots and lengths.

    Args:
        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim]; queries, keys, values of the token
            at position ``lengths - 1`` of each row. May be overwritten.
        positions: int [rows]; to encode them with.
        written: int64 [rows]; where that token goes in the flattened pages, -1 for padding.

    Returns:
        [rows, num_heads * head_dim].
    """
    at = positions, written, keys, values, block_table, slots, lengths
    if has_triton_kernels(qkv):
        from asyncllm.kernels.triton.attention.decode_heads import decode_heads as launch

        return launch(qkv, encoding, *at, spec)
    return decode_heads_reference(qkv, encoding, *at, spec)


def decode_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    spec: AttentionSpec,
    *,
    out: Tensor | None = None,
    beside: bool = False,
) -> Tensor:
    """``decode_attention`` in plain torch, row by row, in float32."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not beside:
        out.zero_()
    page_size, group = keys.shape[1], spec.num_heads // spec.num_kv_heads
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            continue
        first = 0 if spec.window is None else max(length - spec.window, 0)
        tokens = torch.arange(first, length, device=q.device)
        cells = block_table[slot, tokens // page_size].long() * page_size + tokens % page_size
        k, v = (pages.flatten(0, 1)[cells].float() for pages in (keys, values))
        grouped = q[row].unflatten(0, (spec.num_kv_heads, group)).float()
        scores = torch.einsum("hgd,thd->hgt", grouped, k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        weights = scores.softmax(-1)
        out[row] = torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1).to(q.dtype)
    return out


def decode_heads_reference(
    qkv: Tensor,
    encoding: HeadEncoding,
    positions: Tensor,
    written: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """``decode_heads`` by ``encode_heads_reference`` and ``decode_attention_reference``."""
    encoded = encode_heads_reference(qkv.clone(), spec, encoding, positions, keys, values, written)
    q = encoded[0]
    return decode_attention_reference(q, keys, values, block_table, slots, lengths, spec).flatten(1)


__all__ = [
    "decode_attention",
    "decode_attention_reference",
    "decode_heads",
    "decode_heads_reference",
]
