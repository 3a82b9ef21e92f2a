"""Attention over the paged KV cache, and what happens to heads before it.

Shapes: keys and values are pages [num_pages, page_size, num_kv_heads, head_dim], contiguous; the
block table is int32 [slots, max_pages], the page numbers of each slot; a slot mapping is int64
[tokens], where each token's K and V go in the flattened pages, -1 for nowhere.
"""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.reference.attention import (
    decode_attention_reference,
    decode_heads_reference,
    encode_heads_reference,
    prefill_attention_reference,
)
from asyncllm.kernels.support import has_triton_kernels
from asyncllm.kernels.types import AttentionSpec, HeadEncoding, PrefillRows


def encode_heads(
    qkv: Tensor,
    spec: AttentionSpec,
    encoding: HeadEncoding,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise and rotate queries and keys in place, and write K and V to their pages.

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim]; queries, keys, values.
        positions: int64 [tokens].

    Returns:
        Views of qkv: q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim].
    """
    if has_triton_kernels(qkv):
        from asyncllm.kernels.triton.qk_norm_rope import encode_heads as launch
    else:
        launch = encode_heads_reference
    return launch(qkv, spec, encoding, positions, keys, values, slot_mapping)


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: PrefillRows,
    spec: AttentionSpec,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend the new tokens of each row to its sequence in the paged cache, themselves included.

    Tokens before the first row are assumed to be decode rows whose attention is launched next and
    overlaps this launch: see ``decode_attention``.

    Args:
        q: [tokens, num_heads, head_dim], the last dimension contiguous.
        keys, values: must already hold the new tokens.
        out: where to write the result, contiguous; by default a new tensor.

    Returns:
        [tokens, num_heads, head_dim]; tokens of no row are left as they were.
    """
    if has_triton_kernels(q):
        from asyncllm.kernels.triton.attention.prefill import prefill_attention as launch

        return launch(q, keys, values, block_table, rows, spec, out=out)
    return prefill_attention_reference(q, keys, values, block_table, rows, spec, out=out)


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
        slots: int [rows].
        lengths: int [rows]; positions of the row that are written, the query's own included. 0 for
            padding, whose result is 0.
        out: where to write the result, contiguous; by default a new tensor.
        overlaps_previous: overlap the kernel launched just before, whose results must not be
            needed here, and which must have waited for our inputs before it let this one start, as
            ``prefill_attention`` does. Results of padding are left as they were.

    Returns:
        [rows, num_heads, head_dim], contiguous.
    """
    rows = q, keys, values, block_table, slots, lengths, spec
    if has_triton_kernels(q):
        from asyncllm.kernels.triton.attention.decode import decode_attention as launch

        return launch(*rows, out=out, overlaps_previous=overlaps_previous)
    return decode_attention_reference(*rows, out=out, overlaps_previous=overlaps_previous)


def decode_heads(
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
    """``encode_heads``, then ``decode_attention``; in one kernel if that is faster.

    Positions and the slot mapping may be read as early as slots and lengths.

    Args:
        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim]; queries, keys, values of the token
            at position ``lengths - 1`` of each row. May be overwritten.
        positions: int [rows]; the rotary positions.

    Returns:
        [rows, num_heads * head_dim].
    """
    rows = positions, slot_mapping, keys, values, block_table, slots, lengths
    if has_triton_kernels(qkv):
        from asyncllm.kernels.triton.attention.decode_heads import decode_heads as launch

        return launch(qkv, encoding, *rows, spec)
    return decode_heads_reference(qkv, encoding, *rows, spec)
