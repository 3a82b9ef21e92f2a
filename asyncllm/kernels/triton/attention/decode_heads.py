"""Encoding and attention of decode rows in one kernel, for few rows and on Hopper GPUs.

Each program of a row and K/V head encodes the query heads again. The program with the newest token
also encodes its key, writes key and value to their page, and takes them into its softmax from
registers: no program reads what another one writes. The measurements are in ``decode``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncllm.kernels.triton.attention import decode_hopper
from asyncllm.kernels.triton.attention.decode import decode_attention, launch
from asyncllm.kernels.triton.attention.decode_launch import Cut, Heads, Rows, choose_cut, fitted
from asyncllm.kernels.triton.qk_norm_rope import encode_heads, encoding_of, kv_kinds

if TYPE_CHECKING:
    from torch import Tensor

    from asyncllm.kernels.types import AttentionSpec, HeadEncoding

#: Up to this many rows times K/V heads, one kernel is faster than two, ``decode_hopper`` aside.
FUSED_PAIRS = 128


def choose_fused_cut(rows: int, spec: AttentionSpec, max_length: int, itemsize: int) -> Cut:
    """``choose_cut`` for one kernel."""
    if rows * spec.num_kv_heads <= 64:
        return choose_cut(rows, spec, max_length, itemsize)
    return fitted(Cut(8, 128, 32, 1, 2), spec, max_length, itemsize)


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
    *,
    out: Tensor | None = None,
    cut: Cut | None = None,
    fused: bool | None = None,
) -> Tensor:
    """See ``kernels.attention.decode_heads``."""
    num_rows = len(qkv)
    if out is None:
        size = spec.num_heads * spec.head_dim
        out = torch.empty(num_rows, size, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    rows = Rows(keys, values, block_table, slots, lengths)
    weights, constants = encoding_of(encoding)
    tensors = (*weights, positions, slot_mapping)
    heads = Heads(True, tensors, constants, encoding.sinks, encoding.normalizes_values)
    # The kernel for Hopper encodes the commonest layers only.
    plain = kv_kinds(spec) == 2 and spec.pair_distance is None and not encoding.normalizes_values
    if cut is None and fused is not False and plain and decode_hopper.supports(qkv, rows, spec):
        decode_hopper.launch(qkv, qkv.stride(0), spec.head_dim, heads, rows, spec, out)
        return out
    if fused is None:
        fused = num_rows * spec.num_kv_heads <= FUSED_PAIRS
    if not fused:
        q = encode_heads(qkv, spec, encoding, positions, keys, values, slot_mapping)
        decode_attention(q, *rows, spec, sinks=encoding.sinks, out=out.view(q.shape), cut=cut)
        return out
    max_length = block_table.shape[1] * keys.shape[1]
    cut = cut or choose_fused_cut(num_rows, spec, max_length, qkv.itemsize)
    launch(qkv, qkv.stride(0), spec.head_dim, heads, rows, spec, out, cut)
    return out
