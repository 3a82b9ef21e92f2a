from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.reference.norm import rms_norm_reference
from asyncllm.kernels.types import AttentionSpec, HeadEncoding, PrefillRows


def encode_heads_reference(
    qkv: Tensor,
    spec: AttentionSpec,
    encoding: HeadEncoding,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels.attention.encode_heads``."""
    q, k, v = spec.split_heads(qkv)
    for heads, norm in ((q, encoding.q_norm), (k, encoding.k_norm)):
        encoded = heads if norm is None else rms_norm_reference(heads, norm)
        if encoding.rope is not None:
            encoded = _rotate(encoded, encoding.rope.index_select(0, positions))
        if encoded is not heads:
            heads.copy_(encoded)
    _write(keys, k, slot_mapping)
    _write(values, v, slot_mapping)
    return q, k, v


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the leading elements of each head; x [tokens, heads, head_dim]."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def _write(pages: Tensor, heads: Tensor, slot_mapping: Tensor) -> None:
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        heads, slot_mapping = heads[kept], slot_mapping[kept]
    pages.flatten(0, 1).index_copy_(0, slot_mapping, heads)


def prefill_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: PrefillRows,
    spec: AttentionSpec,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See ``kernels.attention.prefill_attention``; in float32 or better."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    bounds = rows.q_offsets.tolist()
    for i, (slot, start) in enumerate(zip(rows.slots.tolist(), rows.starts.tolist(), strict=True)):
        row = slice(bounds[i], bounds[i + 1])
        if row.start < row.stop:
            out[row] = _attend(q[row], start, keys, values, block_table[slot], spec)
    return out


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
    overlaps_previous: bool = False,
) -> Tensor:
    """See ``kernels.attention.decode_attention``; in float32 or better."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not overlaps_previous:
        out.zero_()
    for i, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length > 0:
            row = slice(i, i + 1)
            out[row] = _attend(q[row], length - 1, keys, values, block_table[slot], spec)
    return out


def decode_heads_reference(
    qkv: Tensor,
    encoding: HeadEncoding,
    positions: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """See ``kernels.attention.decode_heads``."""
    q, _, _ = encode_heads_reference(
        qkv.clone(), spec, encoding, positions, keys, values, slot_mapping
    )
    return decode_attention_reference(q, keys, values, block_table, slots, lengths, spec).flatten(1)


def _attend(
    q: Tensor, start: int, keys: Tensor, values: Tensor, pages: Tensor, spec: AttentionSpec
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
    k, v = (
        tokens.flatten(0, 1)[cells].to(compute).repeat_interleave(spec.group, dim=1)
        for tokens in (keys, values)
    )
    scores = torch.einsum("qhd,khd->hqk", q.to(compute), k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    hidden = key_at > query_at
    if spec.window is not None:
        hidden |= key_at <= query_at - spec.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
