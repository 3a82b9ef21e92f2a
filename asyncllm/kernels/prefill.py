"""Causal attention of rows of several new tokens over the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncllm.kernels.native import has_triton_kernels

if TYPE_CHECKING:
    from asyncllm.attention.base import AttentionSpec


class ExtendRows:
    """Rows of any number of new tokens; what kernels find out about them is kept for all layers.

    Nothing is read on the host, so that a captured launch serves other rows, and fewer tokens.

    Args:
        slots, starts: integers [rows]: each row's sequence, and the position of its first token.
        q_offsets: integers [rows + 1], ascending: tokens q_offsets[i] .. q_offsets[i + 1] - 1 of
            the step are row i's. A row may have none, and tokens before and behind belong to none.
    """

    def __init__(self, slots: Tensor, starts: Tensor, q_offsets: Tensor):
        self.slots = slots
        self.starts = starts
        self.q_offsets = q_offsets
        self._tiles: dict[tuple[int, int], Tensor] = {}

    def tiles(self, num_tokens: int, size: int, room: int = 1) -> Tensor:
        """See ``kernels.triton.extend_tiles.find_tiles``."""
        key = size, room
        if key not in self._tiles:
            from asyncllm.kernels.triton.attention.prefill_tiles import find_tiles

            rows = self.slots, self.starts, self.q_offsets
            self._tiles[key] = find_tiles(*rows, num_tokens, size, room)
        return self._tiles[key]


def extend_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: ExtendRows,
    spec: AttentionSpec,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each row's new tokens to its sequence in the paged cache, themselves included.

    Tokens before those of all rows are taken for decode rows that the next launch attends beside
    this one: see ``decode_attention``.

    Args:
        q: [tokens, num_heads, head_dim], the last dimension contiguous.
        keys, values: [num_pages, page_size, num_kv_heads, head_dim], contiguous; the new tokens'
            are written already.
        block_table: int32 [slots, max_pages]; page numbers by slot.
        out: where to write the result, contiguous; by default a new tensor.

    Returns:
        [tokens, num_heads, head_dim]; what is there in tokens of no row is left alone.
    """
    if has_triton_kernels(q):
        from asyncllm.kernels.triton.attention.prefill import extend_attention as launch

        return launch(q, keys, values, block_table, rows, spec, out=out)
    return extend_attention_reference(q, keys, values, block_table, rows, spec, out=out)


def extend_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: ExtendRows,
    spec: AttentionSpec,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``extend_attention`` in plain torch, in float32 or better."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    page_size = keys.shape[1]
    compute = torch.promote_types(q.dtype, torch.float32)
    group = spec.num_heads // spec.num_kv_heads
    bounds = rows.q_offsets.tolist()
    for i, (slot, start) in enumerate(zip(rows.slots.tolist(), rows.starts.tolist(), strict=True)):
        first, end = bounds[i], bounds[i + 1]
        if first == end:
            continue
        key_at = torch.arange(start + end - first, device=q.device)
        query_at = key_at[start:, None]
        cells = block_table[slot, key_at // page_size].long() * page_size + key_at % page_size
        k, v = (
            pages.flatten(0, 1)[cells].to(compute).repeat_interleave(group, dim=1)
            for pages in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", q[first:end].to(compute), k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        hidden = key_at > query_at
        if spec.window is not None:
            hidden |= key_at <= query_at - spec.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


__all__ = ["ExtendRows", "extend_attention", "extend_attention_reference"]
