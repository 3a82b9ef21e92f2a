"""Attention of which each token has the same bits in any batch, over the paged KV cache.

The keys of a sequence are cut into pieces at fixed positions: short ones at its beginning, longer
ones further on. In each piece a running softmax starts anew and goes through tiles of KEYS keys;
then the pieces are added up in order. What a token sees past its own position has a weight of
exactly 0, and changes no bit.

Rows of one token have programs for their pieces, and another kernel adds these up. Longer rows have
programs for tiles of queries, which go through all pieces. A warp multiplies 16 queries by the same
tiles in both, with the same instructions in the same order; multiplications and additions are not
fused, as the compiler would choose differently in each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.attention.decode_pieces import LOWEST, take_sinks
from asyncllm.kernels.triton.attention.ordered_parts import (
    PIECES,
    add_piece,
    count_pieces,
    keys_of_tile,
    piece_of,
    take_piece,
)
from asyncllm.kernels.triton.attention.prefill_tiles import find_tiles, load_tile
from asyncllm.kernels.triton.launch import Launcher, Scratch, next_power_of_2
from asyncllm.kernels.types import AttentionSpec, DecodeRows, PrefillRows

#: Programs of a row and K/V head, which take turns with its pieces.
SPLITS = 16
#: Above so many rows times K/V heads, they are fewer.
MANY_PAIRS = 512
#: Queries (times the heads of a group) of a tile of a longer row.
QUERIES = 64


@triton.jit(do_not_specialize=["table_stride", "window", "room"])
def _attend_pieces(
    q, keys, values, block_table, slots, lengths, scales, partial, stats,
    table_stride, q_row_stride, q_head_stride, scale, softcap, window, room,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr,
    DIMS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one token. ``partial`` is [pairs, room, GROUP, HEAD_DIM], ``stats`` [pairs, room, 2,
    GROUP]: the peak and the total of each piece."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    G: tl.constexpr = triton.next_power_of_2(GROUP) if GROUP > 16 else 16
    kv_head = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.maximum(length - window, 0) if HAS_WINDOW else 0
    end = piece_of(length - 1) + 1
    piece = piece_of(first) + tl.program_id(1)
    if (length == 0) | (piece >= end):
        return
    table = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    lane = tl.arange(0, G)
    dim = tl.arange(0, DIMS)
    inside = (lane < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    at = lane[:, None] * HEAD_DIM + dim[None, :]
    heads = q + row * q_row_stride + (kv_head * GROUP + lane[:, None]) * q_head_stride
    queries = tl.load(heads + dim[None, :], mask=inside, other=0.0)
    query_at = tl.full([G], length - 1, tl.int32)
    pair = row * KV_HEADS + kv_head
    if scales is not None:
        scale *= tl.load(scales + kv_head)
    least = first // KEYS * KEYS
    whole = 0 if HAS_WINDOW else length // KEYS * KEYS
    for number in range(piece, end, tl.num_programs(1)):
        acc, total, peak = take_piece(
            number, least, whole, length, queries, query_at, keys, values, table, kv_head, scale,
            softcap, window, HAS_SOFTCAP, HAS_WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, KEYS, DIMS,
            PRECISION,
        )  # fmt: skip
        cell = pair * room + number
        tl.store(partial + cell * (GROUP * HEAD_DIM) + at, acc, mask=inside)
        stat = stats + cell * (2 * GROUP) + lane
        tl.store(stat, peak, mask=lane < GROUP)
        tl.store(stat + GROUP, total, mask=lane < GROUP)


@triton.jit(do_not_specialize=["window", "room"])
def _add_pieces(
    out, partial, stats, lengths, scales, sinks, window, room,
    ZEROES: tl.constexpr, HAS_WINDOW: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The results of one head of a row; with ZEROES, those of padding are 0."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    if not ZEROES and length == 0:
        return
    first = tl.maximum(length - window, 0) if HAS_WINDOW else 0
    dim = tl.arange(0, DIMS)
    cell = (row * (HEADS // GROUP) + head // GROUP) * room * GROUP + head % GROUP
    stat = (row * (HEADS // GROUP) + head // GROUP) * room * (2 * GROUP) + head % GROUP
    acc = tl.zeros([1, DIMS], tl.float32)
    total = tl.zeros([1], tl.float32)
    peak = tl.full([1], LOWEST, tl.float32)
    one = tl.arange(0, 1)
    begin = piece_of(first)
    end = tl.where(length == 0, 0, piece_of(length - 1) + 1)
    for base in range(begin, end, 4):
        # The loads of four pieces are on their way together.
        for i in tl.static_range(4):
            piece = base + i
            exists = piece < end
            at = partial + (cell + piece * GROUP) * HEAD_DIM + dim[None, :]
            part = tl.load(at, mask=exists & (dim < HEAD_DIM)[None, :], other=0.0)
            piece_peak = tl.load(stats + stat + piece * (2 * GROUP) + one, exists, other=LOWEST)
            piece_total = tl.load(stats + stat + piece * (2 * GROUP) + GROUP + one, exists, other=0)
            acc, total, peak = add_piece(acc, total, peak, part, piece_total, piece_peak)
    if sinks is not None:
        acc, total, _ = take_sinks(acc, total, peak, tl.load(sinks + head + one))
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if scales is not None:
        result *= tl.load(scales + HEADS // GROUP + head // GROUP)
    at = out + (row * HEADS + head) * HEAD_DIM + dim[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(dim < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend_rows(
    q, keys, values, out, block_table, tiles, scales, sinks,
    table_stride, q_token_stride, q_head_stride, scale, softcap, window,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, DIMS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of queries of longer rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    if tile >= tl.load(tiles):
        return
    queries, inside, token, head, query_at, first, stop, table = load_tile(
        q, block_table, tiles, tile, kv_head, table_stride, q_token_stride, q_head_stride,
        GROUP, HEAD_DIM, QUERIES, DIMS,
    )  # fmt: skip
    if scales is not None:
        scale *= tl.load(scales + kv_head)
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], LOWEST, tl.float32)
    least = 0
    # Tiles of which all queries see every key need no mask.
    whole = (first + 1) // KEYS * KEYS
    if HAS_WINDOW:
        least = tl.maximum(first + 1 - window, 0) // KEYS * KEYS
        whole = 0
    for piece in range(piece_of(least), piece_of(stop - 1) + 1):
        piece_acc, piece_total, piece_peak = take_piece(
            piece, least, whole, stop, queries, query_at, keys, values, table, kv_head, scale,
            softcap, window, HAS_SOFTCAP, HAS_WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, KEYS, DIMS,
            PRECISION,
        )  # fmt: skip
        acc, total, peak = add_piece(acc, total, peak, piece_acc, piece_total, piece_peak)
    if sinks is not None:
        acc, total, _ = take_sinks(acc, total, peak, tl.load(sinks + head))
    # Lanes without a query may have a total of 0.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if scales is not None:
        result *= tl.load(scales + KV_HEADS + kv_head)
    out_at = (token.to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    dim = tl.arange(0, DIMS)
    tl.store(out + out_at[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)


_launch_pieces = Launcher(_attend_pieces, fuses=False)
_launch_sum = Launcher(_add_pieces, fuses=False)
_launch_rows = Launcher(_attend_rows, fuses=False)
_scratch = Scratch()


def ordered_decode_attention(
    q: Tensor,
    rows: DecodeRows,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``kernels.attention.ordered_decode_attention``."""
    zeroes, count = out is None, len(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if count == 0:
        return out
    max_length = rows.block_table.shape[1] * rows.keys.shape[1]
    seen = max_length if spec.window is None else min(spec.window + PIECES[0], max_length)
    room = count_pieces(max_length)
    splits = min(SPLITS, count_pieces(seen))
    while splits > 4 and count * spec.num_kv_heads * splits > MANY_PAIRS * 16:
        splits //= 2
    cells = count * spec.num_heads * room
    floats = _scratch.floats(cells * (2 + spec.head_dim), q.device)
    partial, stats = floats[: cells * spec.head_dim], floats[cells * spec.head_dim :]
    dims = max(next_power_of_2(spec.head_dim), 16)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    _launch_pieces(
        (spec.num_kv_heads, splits, count),
        (
            *(q, rows.keys, rows.values, rows.block_table, rows.slots, rows.lengths, rows.scales),
            *(partial, stats, rows.block_table.stride(0), q.stride(0), q.stride(1)),
            *(spec.scale, spec.softcap or 0.0, spec.window or 0, room),
        ),
        (
            *(spec.softcap is not None, spec.window is not None, rows.keys.shape[1]),
            *(spec.num_kv_heads, spec.group, spec.head_dim, keys_of_tile(dims), dims, precision),
        ),
        1,
        2,
    )
    _launch_sum(
        (spec.num_heads, count, 1),
        (out, partial, stats, rows.lengths, rows.scales, sinks, spec.window or 0, room),
        (zeroes, spec.window is not None, spec.num_heads, spec.group, spec.head_dim, dims),
        1,
    )
    return out


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
    """See ``kernels.attention.ordered_prefill_attention``."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    group, dims = spec.group, max(next_power_of_2(spec.head_dim), 16)
    # Of large heads, as many as have room in the shared memory of any GPU.
    queries = max(QUERIES if dims <= 256 else 16, next_power_of_2(group))
    tiles = find_tiles(rows, len(q), queries // group)
    most = len(q) // (queries // group) + len(rows.slots)
    _launch_rows(
        (spec.num_kv_heads * most, 1, 1),
        (
            *(q, keys, values, out, block_table, tiles, scales, sinks),
            *(block_table.stride(0), q.stride(0), q.stride(1)),
            *(spec.scale, spec.softcap or 0.0, spec.window or 0),
        ),
        (
            *(spec.softcap is not None, spec.window is not None),
            *(keys.shape[1], spec.num_kv_heads, group, spec.head_dim, queries),
            *(keys_of_tile(dims), dims),
            "ieee" if q.dtype == torch.float32 else "tf32",
        ),
        queries // 16,
        2,
    )
    return out
