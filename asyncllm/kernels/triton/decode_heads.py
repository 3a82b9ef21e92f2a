"""Decode rows from their projection to their attention, in one Triton kernel.

Every program of a row and K/V head encodes the query heads anew, which costs less than a launch
of its own. The one with the row's last piece also encodes the new key, writes key and value to
their page, and takes them into its softmax from registers: no program reads what another writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from asyncllm.kernels.triton.decode import Cut, choose_cut, launch_constants, workspace
from asyncllm.kernels.triton.decode_pieces import LOWEST, attend, find_piece, finish, in_log2, take_tile

if TYPE_CHECKING:
    from torch import Tensor

    from asyncllm.attention.base import AttentionSpec
    from asyncllm.kernels.heads import HeadEncoding
    from asyncllm.kernels.norm import Norm


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
    *,
    out: Tensor | None = None,
    cut: Cut | None = None,
    hints: int = 0,
) -> Tensor:
    """See ``kernels.decode.decode_heads``."""
    num_rows, page_size = len(qkv), keys.shape[1]
    if out is None:
        size = spec.num_heads * spec.head_dim
        out = torch.empty(num_rows, size, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    cut = cut or choose_cut(num_rows, spec, block_table.shape[1] * page_size, qkv.itemsize)
    partial, stats, arrivals = workspace(num_rows, spec, cut, qkv.device)
    rope = encoding.rope
    pdl: dict[str, Any] = {"launch_pdl": True} if qkv.is_cuda else {}
    _decode_heads[(spec.num_kv_heads, cut.splits, num_rows)](
        qkv,
        None if encoding.q_norm is None else encoding.q_norm.weight,
        None if encoding.k_norm is None else encoding.k_norm.weight,
        rope,
        positions,
        written,
        keys,
        values,
        block_table,
        slots,
        lengths,
        out,
        partial,
        stats,
        arrivals,
        block_table.stride(0),
        qkv.stride(0),
        spec.scale,
        spec.softcap or 0.0,
        spec.window or 0,
        Q_NORM=_norm_constants(encoding.q_norm),
        K_NORM=_norm_constants(encoding.k_norm),
        ROTARY=0 if rope is None else rope.shape[1],
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_WINDOW=spec.window is not None,
        PAGE_SIZE=page_size,
        KV_HEADS=spec.num_kv_heads,
        GROUP=spec.num_heads // spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        **launch_constants(spec, qkv.dtype, cut),
        HINTS=hints,
        PDL=bool(pdl),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **pdl,
    )
    return out


def _norm_constants(norm: Norm | None) -> tuple[float, bool]:
    """eps, negative where there is no norm, and offset."""
    return (-1.0, False) if norm is None else (norm.eps, norm.offset)


@triton.jit(do_not_specialize=["window"])
def _decode_heads(
    qkv,
    q_weight,
    k_weight,
    rope,
    positions,
    written,
    keys,
    values,
    block_table,
    slots,
    lengths,
    out,
    partial,
    stats,
    arrivals,
    table_stride,
    qkv_stride,
    scale,
    softcap,
    window,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    HINTS: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.program_id(2)
    if PDL:
        if HINTS == 1:
            hint_pieces(
                keys, values, block_table, slots, lengths, table_stride, window, kv_head, piece,
                row, HAS_WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, SPLITS, CHUNK, TILE, D, 2,
            )  # fmt: skip
        if HINTS < 2:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(lengths + row).to(tl.int32)
    table = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    old = tl.maximum(length - 1, 0)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin, end, pieces = find_piece(first, old, piece, CHUNK, SPLITS, TILE)
    if piece >= pieces:
        return
    dim = tl.arange(0, D)
    if HINTS >= 2:
        token = begin + tl.arange(0, TILE)
        exists = token < end
        page = tl.load(table + token // PAGE_SIZE, mask=exists, other=0)
        if HINTS == 3:
            cell = page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE
            tile = (cell * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
            early_k = tl.load(keys + tile, mask=exists[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
            early_v = tl.load(values + tile, mask=exists[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        if PDL:
            if HINTS == 2:
                line = tl.arange(0, 2) * 64
                cell = page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE
                tile = (cell * KV_HEADS + kv_head)[:, None] * HEAD_DIM + line[None, :]
                _prefetch(keys + tile)
                _prefetch(values + tile)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    qkv += row.to(tl.int64) * qkv_stride
    position = tl.load(positions + row)
    G: tl.constexpr = triton.next_power_of_2(GROUP)
    few = tl.arange(0, G)
    queries = encode(
        qkv + (kv_head * GROUP + few) * HEAD_DIM,
        few < GROUP,
        q_weight,
        rope,
        position,
        Q_NORM[0],
        Q_NORM[1],
        ROTARY,
        HEAD_DIM,
        D,
    )
    queries = tl.broadcast_to(queries[None, :, :], [M // G, G, D]).reshape(M, D)
    acc = tl.zeros([M, D], tl.float32)
    total = tl.zeros([M], tl.float32)
    peak = tl.full([M], LOWEST, tl.float32)
    if piece == pieces - 1:
        one = tl.arange(0, 1)
        key = qkv + ((GROUP * KV_HEADS) + kv_head) * HEAD_DIM
        k = encode(
            key + one, one < 1, k_weight, rope, position, K_NORM[0], K_NORM[1], ROTARY, HEAD_DIM, D
        )
        v = tl.load(key + KV_HEADS * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)[None, :]
        place = tl.load(written + row).to(tl.int64)
        at = (place * KV_HEADS + kv_head) * HEAD_DIM + dim[None, :]
        store = (place >= 0) & (dim < HEAD_DIM)[None, :]
        tl.store(keys + at, k, mask=store)
        tl.store(values + at, v, mask=store)
        if length > 0:
            dots = tl.sum(queries.to(tl.float32) * k.to(tl.float32), axis=1)
            peak = in_log2(dots, scale, softcap, HAS_SOFTCAP)
            total += 1.0
            acc += v.to(tl.float32)
    if HINTS == 3:
        acc, total, peak = take_tile(
            queries, early_k, early_v, exists, acc, total, peak, scale, softcap, HAS_SOFTCAP,
            PRECISION,
        )  # fmt: skip
        begin += TILE
    acc, total, peak = attend(
        queries,
        acc,
        total,
        peak,
        begin,
        end,
        keys,
        values,
        table,
        kv_head,
        scale,
        softcap,
        HAS_SOFTCAP,
        PAGE_SIZE,
        KV_HEADS,
        HEAD_DIM,
        TILE,
        PRECISION,
    )
    finish(
        acc, total, peak, row, kv_head, piece, pieces, out, partial, stats, arrivals,
        SPLITS, KV_HEADS, GROUP, HEAD_DIM, STEP,
    )  # fmt: skip


@triton.jit
def encode(
    heads,
    exists,
    weight,
    rope,
    position,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Normalise and rotate the heads at these addresses, as ``kernels.heads.encode_heads`` does.

    Each element meets the one that it turns with by a second load, not by an exchange between
    threads.
    """
    HALF: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, D)
    inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    x = tl.load(heads[:, None] + dim[None, :], mask=inside, other=0.0)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    inverse = tl.full([heads.shape[0]], 1.0, tl.float32)
    if EPS >= 0:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + EPS)
        x = _scaled(x, inverse, weight, dim, OFFSET, HEAD_DIM, dtype)
    if ROTARY > 0:
        turns = dim < ROTARY
        other = tl.where(turns, tl.where(dim < HALF, dim + HALF, dim - HALF), dim)
        y = tl.load(heads[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
        if EPS >= 0:
            y = _scaled(y, inverse, weight, other, OFFSET, HEAD_DIM, dtype)
        angle = rope + position.to(tl.int64) * ROTARY + tl.where(dim < HALF, dim, dim - HALF)
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + HALF, mask=turns, other=0.0)
        x = x * cos[None, :] + y * tl.where(dim < HALF, -sin, sin)[None, :]
    return x.to(dtype)


@triton.jit
def _scaled(
    x, inverse, weight, dim, OFFSET: tl.constexpr, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr
):
    """x times inverse, [rows, D] and [rows], times the weight; rounded as ``Norm`` says."""
    factor = tl.load(weight + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    x *= inverse[:, None]
    if OFFSET:
        x *= 1.0 + factor
    else:
        x = x.to(DTYPE).to(tl.float32) * factor
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def hint_pieces(
    keys,
    values,
    block_table,
    slots,
    lengths,
    table_stride,
    window,
    kv_head,
    piece,
    row,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    TILES: tl.constexpr,
):
    """Ask the L2 cache for the first tiles of a piece, before earlier kernels have finished.

    A hint is all it is: lengths, slots and pages are read past the L1 cache, may be of the step
    before, and are read again afterwards. They are valid numbers at all times.
    """
    length = tl.load(lengths + row, cache_modifier=".cg").to(tl.int32)
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    table = block_table + slot * table_stride
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin, end, _ = find_piece(first, tl.maximum(length - 1, 0), piece, CHUNK, SPLITS, TILE)
    if begin < end:
        # An instruction fetches 128 bytes.
        LINE: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = (D + LINE - 1) // LINE
        line = tl.arange(0, LINES) * LINE
        position = tl.minimum(begin + tl.arange(0, TILE * TILES), end - 1)
        page = tl.load(table + position // PAGE_SIZE, cache_modifier=".cg")
        cell = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        at = ((cell * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + line[None, :]
        _prefetch(keys + at)
        _prefetch(values + at)


@triton.jit
def _prefetch(addresses):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


__all__ = ["decode_heads"]
