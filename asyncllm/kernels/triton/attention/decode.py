"""Attention of decode rows over the paged KV cache, in Triton.

Flash decoding (Dao et al., 2023): the tokens of a row are cut into pieces, one for each program; a
program attends all query heads of one K/V head to its piece, and the program that finishes the last
piece of a row adds them up. Grid: K/V heads, pieces, rows.

With few rows, latency decides. A program requests its first K and V before the previous kernels
have finished; the newest token, which those write, enters the softmax separately. Only then may the
next kernel start: the weights that it loads early would delay K and V, 1 x 640 by 1 us. The query
heads of a group are the rows of a dot, which the compiler pads for the tensor cores.

With many rows, the GPU is at its power limit, and instructions cost time. With offsets in 32 bits
and a partial total in each thread, a tile takes 480 instead of 680 instructions of a warp, and a
layer of Qwen3-8B with 160 rows 272 instead of 278 us. On Hopper GPUs ``decode_hopper`` needs even
fewer, for more than two rows of 8 K/V heads.

Measured on an H200 (docs/kernels.md): 5.5 us of a layer for one row of 300 tokens, and within 10 %
of the memory's speed for 128 rows. Adding up pieces takes 2 us: store, counter and loads each go to
the L2 cache and back. Rejected: a program for each whole row (bad for mixed lengths), a last piece
that polls the others, and equal shares of all rows' tokens for each program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.attention import decode_hopper
from asyncllm.kernels.triton.attention.decode_encode import (
    as_float16,
    begin_softmax,
    load_encoding,
    softmax_of_none,
)
from asyncllm.kernels.triton.attention.decode_launch import (
    UNENCODED,
    Cut,
    Heads,
    choose_cut,
    fitted,
    max_length,
    workspace_of,
)
from asyncllm.kernels.triton.attention.decode_pieces import (
    cut_row,
    finish,
    load_page,
    place_of,
    take_sinks,
    take_tile,
)
from asyncllm.kernels.triton.launch import Launcher
from asyncllm.kernels.triton.qk_norm_rope import encode_heads, encoding_of, kv_kinds
from asyncllm.kernels.types import AttentionSpec, DecodeRows, HeadEncoding


def decode_attention(
    q: Tensor,
    rows: DecodeRows,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    overlaps_previous: bool = False,
    cut: Cut | None = None,
) -> Tensor:
    """See ``kernels.attention.decode_attention``."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if len(q) == 0:
        return out
    queries = (q, q.stride(0), q.stride(1), UNENCODED._replace(sinks=sinks))
    if cut is None and decode_hopper.supports(q, rows, spec):
        decode_hopper.launch(*queries, rows, spec, out, overlaps_previous)
        return out
    cut = cut or choose_cut(len(q), spec, max_length(rows), q.itemsize)
    launch(*queries, rows, spec, out, cut, overlaps_previous)
    return out


def launch(
    q: Tensor,
    row_stride: int,
    head_stride: int,
    heads: Heads,
    rows: DecodeRows,
    spec: AttentionSpec,
    out: Tensor,
    cut: Cut,
    overlaps_previous: bool = False,
) -> None:
    """Launch the kernel; q holds queries, or a projection's output if ``heads.encodes``."""
    args = (
        *(q, row_stride, head_stride, *heads.tensors, heads.sinks, *rows),
        *(out, *workspace_of(q.device, len(q), spec, cut.splits), rows.block_table.stride(0)),
        *(spec.scale, spec.softcap or 0.0, spec.window or 0, cut.splits, cut.chunk),
    )
    constants = (
        *(heads.encodes, kv_kinds(spec), spec.pair_distance or heads.constants[0] // 2),
        *(*heads.constants, heads.normalizes_values),
        *(spec.softcap is not None, spec.window is not None),
        *(rows.keys.shape[1], spec.num_kv_heads, spec.group),
        *(
            spec.head_dim,
            cut.tile,
            "ieee" if q.dtype == torch.float32 else "tf32",
            overlaps_previous,
        ),
    )
    grid = (spec.num_kv_heads, cut.splits, len(q) + overlaps_previous)
    _launch(grid, args, constants, cut.warps, cut.stages)


# The tensors with one element per row are often slices of an upload, of any alignment.
@triton.jit(
    do_not_specialize=["table_stride", "window", "splits", "chunk"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "slots", "lengths"],
)
def _decode(
    q,
    q_row_stride,
    q_head_stride,
    q_weight,
    k_weight,
    rope,
    positions,
    slot_mapping,
    sinks,
    keys,
    values,
    block_table,
    slots,
    lengths,
    scales,
    out,
    partial,
    stats,
    arrivals,
    table_stride,
    scale,
    softcap,
    window,
    splits,
    chunk,
    ENCODES: tl.constexpr,
    KV_KINDS: tl.constexpr,
    DISTANCE: tl.constexpr,
    ROTARY: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMALIZES_VALUES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    G: tl.constexpr = triton.next_power_of_2(GROUP)
    D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    if OVERLAPS and row == tl.num_programs(2) - 1:
        # The extra row waits, so that kernels after this one also wait for the previous kernel.
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    # Before the wait, nothing is read that previous kernels write, and nothing is used but what the
    # addresses of K and V depend on, so that only these loads delay them.
    query_encoding = None
    key_encoding = None
    place = None
    k_scale = None
    v_scale = None
    WRITES: tl.constexpr = ENCODES and KV_KINDS > 0
    if WRITES:
        place = tl.load(slot_mapping + row, eviction_policy="evict_last").to(tl.int64)
    if ENCODES:
        position = tl.load(positions + row, eviction_policy="evict_last").to(tl.int64)
    length, table, first, stop, size = cut_row(
        row, lengths, slots, block_table, table_stride, window, splits, chunk, HAS_WINDOW, TILE
    )
    begin = first + piece * size
    if (begin >= stop) & ((piece > 0) | (OVERLAPS & (length == 0))):
        return
    end = tl.minimum(begin + size, stop)
    has_newest = (end == stop) & (length > 0)
    if ENCODES:
        query_encoding = load_encoding(q_weight, rope, position, G, ROTARY, DISTANCE, HEAD_DIM)
    if WRITES:
        key_encoding = load_encoding(k_weight, rope, position, 1, ROTARY, DISTANCE, HEAD_DIM)
    else:
        page = load_page(table, length - 1, has_newest, PAGE_SIZE)
        place = page.to(tl.int64) * PAGE_SIZE + (length - 1) % PAGE_SIZE
    dim = tl.arange(0, D)[None, :]
    lane = tl.arange(0, TILE)
    # Lanes past the last token repeat it, so that no stale data in its page is read.
    token = tl.minimum(begin + lane, end - 1)
    page = load_page(table, token, begin < end, PAGE_SIZE)
    at = place_of(page, token, kv_head, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    if scales is not None:
        k_scale = tl.load(scales + kv_head, eviction_policy="evict_last")
        v_scale = tl.load(scales + KV_HEADS + kv_head, eviction_policy="evict_last")
        scale *= k_scale
    # 8-bit numbers are multiplied as float16.
    HALVES: tl.constexpr = scales is not None and q.dtype.element_ty != tl.float32
    queries = tl.zeros([G, D], tl.float16 if HALVES else q.dtype.element_ty)
    of_queries = scale
    if HALVES:
        of_queries = tl.full([G, 1], 1.0, tl.float32) * scale
    acc, total, peak = softmax_of_none(G, D)
    totals = tl.zeros([G, TILE], tl.float32)
    for start in range(begin, tl.maximum(end, begin + 1), TILE):
        exists = (dim < HEAD_DIM) & (begin < end)
        k = tl.load((keys + dim) + at[:, None], mask=exists, other=0.0)
        v = tl.load((values + dim) + at[:, None], mask=exists, other=0.0)
        token = tl.minimum(start + TILE + lane, end - 1)
        page = load_page(table, token, begin < end, PAGE_SIZE)
        at = place_of(page, token, kv_head, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        # In the loop, so that its first loads come before the wait.
        if start == begin:
            if PDL:
                tl.extra.cuda.gdc_launch_dependents()
                if not OVERLAPS:
                    tl.extra.cuda.gdc_wait()
            encoded, acc, total, peak = begin_softmax(
                q + row * q_row_stride, q_head_stride, kv_head, has_newest, place, query_encoding,
                key_encoding, keys, values, k_scale, v_scale, scale, softcap, ENCODES, KV_KINDS,
                q_weight is not None, ROTARY, DISTANCE, EPS, OFFSET, NORMALIZES_VALUES, HAS_SOFTCAP,
                KV_HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip
            if HALVES:
                queries, unit = as_float16(encoded)
                of_queries *= unit[:, None]
            else:
                queries = encoded
            totals += tl.where(lane[None, :] == 0, total[:, None], 0.0)
        acc, totals, peak = take_tile(
            queries, k, v, start + lane < end, acc, totals, peak, of_queries, softcap,
            HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    total = tl.sum(totals, axis=1)
    if sinks is not None:
        # In the piece with the newest token alone, or they would count several times.
        head = kv_head * GROUP + tl.minimum(tl.arange(0, G), GROUP - 1)
        own = tl.load(sinks + head, mask=has_newest, other=float("-inf"))
        acc, total, peak = take_sinks(acc, total, peak, own)
    if scales is not None:
        acc *= v_scale
    pieces = tl.maximum(tl.cdiv(stop - first, size), 1)
    finish(
        acc, total, peak, row * KV_HEADS + kv_head, piece, pieces, splits, out, partial, stats,
        arrivals, GROUP, HEAD_DIM,
    )  # fmt: skip


_launch = Launcher(_decode)


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
    rows: DecodeRows,
    spec: AttentionSpec,
    *,
    out: Tensor | None = None,
    cut: Cut | None = None,
    fused: bool | None = None,
) -> Tensor:
    """See ``kernels.attention.decode_heads``.

    In one kernel, each program of a row and K/V head encodes the query heads again. The program
    with the newest token also encodes its key, writes key and value to their page, and takes them
    into its softmax from registers: no program reads what another one writes.
    """
    num_rows = len(qkv)
    if out is None:
        size = spec.num_heads * spec.head_dim
        out = torch.empty(num_rows, size, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    weights, constants = encoding_of(encoding)
    tensors = (*weights, positions, slot_mapping)
    heads = Heads(True, tensors, constants, encoding.sinks, encoding.normalizes_values)
    plain = decode_hopper.encodes(encoding, rows.keys, spec)
    if cut is None and fused is not False and plain and decode_hopper.supports(qkv, rows, spec):
        decode_hopper.launch(qkv, qkv.stride(0), spec.head_dim, heads, rows, spec, out)
        return out
    if fused is None:
        fused = num_rows * spec.num_kv_heads <= FUSED_PAIRS
    if not fused:
        q = encode_heads(qkv, spec, encoding, positions, *rows[:2], slot_mapping, rows.scales)
        decode_attention(q, rows, spec, sinks=encoding.sinks, out=out.view(q.shape), cut=cut)
        return out
    cut = cut or choose_fused_cut(num_rows, spec, max_length(rows), qkv.itemsize)
    launch(qkv, qkv.stride(0), spec.head_dim, heads, rows, spec, out, cut)
    return out
