"""Projections with a 4-bit integer weight.

On an H200, one row takes 50 to 64 % of bfloat16's time, 32 rows 80 to 120 %, and 128 rows twice as
long (docs/kernels.md): few rows are bound by instructions, about 3 for each weight, not by reading;
more rows are bound by reading x, all of it in every program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.codes import offset_codes, subtract, unpack
from asyncllm.kernels.triton.gemm.epilogue import dot, weight_rows, write
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2, shared_bytes
from asyncllm.kernels.types import Int4Matrix

#: Shared memory of the measured best tile for more than 32 rows.
LARGE_BYTES = 136 << 10


class Tile(NamedTuple):
    """How a launch divides its work.

    Attributes:
        rows: of the weight, of a program.
        parts: products at a time, of consecutive blocks of columns; if several, one for each warp.
        stages: steps whose loads are in flight.
        warps: of a program.
    """

    rows: int
    parts: int
    stages: int
    warps: int


@triton.jit
def _product(
    codes, block, x_at, scale, zero, has_row, rows, N,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The products of PARTS blocks of columns, of codes [PARTS, ROWS, BLOCK_K / 2]."""
    HALF: tl.constexpr = BLOCK_K // 2
    blocks = block + tl.arange(0, PARTS)
    if not EVEN:
        has_row = has_row & (blocks < K // BLOCK_K)[:, None, None]
        blocks = tl.minimum(blocks, K // BLOCK_K - 1)
    first = tl.load(x_at + block * BLOCK_K, has_row, other=0.0)
    second = tl.load(x_at + block * BLOCK_K + HALF, has_row, other=0.0)
    DTYPE: tl.constexpr = first.dtype
    at = (blocks * BLOCK_K // GROUP)[:, None] * N + rows[None, :]
    factor = tl.load(scale + at).to(tl.float32)[:, :, None]
    offset = offset_codes(tl.load(zero + at), DTYPE)[:, :, None]
    low, high = unpack(codes, DTYPE)
    low, high = subtract(low, offset, DTYPE), subtract(high, offset, DTYPE)
    if PARTS == 1:
        low, high = tl.reshape(low, low.shape[1:]), tl.reshape(high, high.shape[1:])
        first, second = (
            tl.reshape(first, first.shape[1:]),
            tl.reshape(second, second.shape[1:]),
        )
        factor = tl.reshape(factor, factor.shape[1:])
        product = tl.zeros([low.shape[0], BLOCK_M], tl.float32)
    else:
        product = tl.zeros([PARTS, low.shape[1], BLOCK_M], tl.float32)
    product = dot(low, first, product)
    return dot(high, second, product) * factor


@triton.jit(do_not_specialize=["M"])
def _int4_skinny(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    x,  # [M, K]
    packed,  # uint8 [N, K / 2]
    scale,  # [K / GROUP, N]
    zero,  # uint8 [K / GROUP, N]
    bias,  # [N]
    M,
    N,
    out_stride,
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_N if ACT is None else 2 * BLOCK_N
    HALF: tl.constexpr = BLOCK_K // 2
    BLOCKS: tl.constexpr = K // BLOCK_K
    EVEN: tl.constexpr = BLOCKS % PARTS == 0
    tile = tl.program_id(0)
    rows = weight_rows(tl.arange(0, ROWS), tile, N, BLOCK_N, ACT is not None)
    m = tl.arange(0, BLOCK_M)
    part = tl.arange(0, PARTS)
    half = tl.arange(0, HALF)
    p_at = packed + (rows * (K // 2))[None, :, None] + (part[:, None] * HALF + half)[:, None, :]
    k = part[:, None] * BLOCK_K + half[None, :]
    x_at = x + (m.to(tl.int64) * x_stride)[None, None, :] + k[:, :, None]
    has_row = (m < M)[None, None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    if PARTS == 1:
        acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([PARTS, ROWS, BLOCK_M], tl.float32)
    for block in tl.range(0, BLOCKS, PARTS, num_stages=STAGES):
        if EVEN:
            codes = tl.load(p_at + block * HALF, eviction_policy="evict_first")
        else:
            codes = tl.load(p_at + block * HALF, (block + part < BLOCKS)[:, None, None], other=0)
        acc += _product(
            codes, block, x_at, scale, zero, has_row, rows, N,
            K, GROUP, BLOCK_K, BLOCK_M, PARTS, EVEN,
        )  # fmt: skip
    y = acc if PARTS == 1 else tl.sum(acc, axis=0)
    write(y, out, bias, tile, M, N, out_stride, BLOCK_M, BLOCK_N, BIAS, RESIDUAL, ACT)


_launch_skinny = Launcher(_int4_skinny)


def int4_skinny(tile: Tile, p: Projection[Int4Matrix]) -> Tensor:
    """For up to 64 rows: the weight is converted in registers; the columns of x are in its order.

    A program computes BLOCK_N outputs of all rows. The weight is the first operand, so that rows of
    x are padded to a multiple of 8, not 16. The warps of a program divide its outputs (with
    warpgroup instructions) or, where there are few of them, the columns.
    """
    x, weight = p.x, p.weight
    out = p.output()
    size, columns = len(weight.packed), x.shape[1]
    block_n = tile.rows if p.act is None else tile.rows // 2
    block_m = max(8, next_power_of_2(len(x)))
    arrays = (weight.packed, weight.scale, weight.zero)
    _launch_skinny(
        (cdiv(out.shape[1], block_n), 1, 1),
        (out, x, *arrays, p.bias, len(x), size, out.stride(0), x.stride(0)),
        (
            *(columns, weight.group, block_m, block_n, weight.block),
            *(tile.parts, tile.stages, *p.epilogue),
        ),
        tile.warps,
    )
    return out


def choose_tile(rows: int, size: int, shared_bytes: int) -> Tile:
    """The measured best for ``rows`` rows of x and a weight of ``size`` rows, if it fits."""
    if rows > 32 and shared_bytes < LARGE_BYTES:
        return Tile(64, 1, 4, 4)
    if rows <= 16:
        if size >= 16384:
            return Tile(64 if rows <= 8 else 32, 4, 3, 4)
        if size <= 4096:
            return Tile(16, 8, 5 if rows <= 8 else 3, 8)
        return Tile(16, 4, 5 if rows <= 8 else 4, 4)
    if size <= 4096 or (rows <= 32 and size < 16384):
        return Tile(16, 4, 3, 4)
    return Tile(64, 1, 4 if rows > 32 and size >= 16384 else 6, 4)


#: Up to this many rows the weight is converted in registers; with more, in memory.
SKINNY = 64


def int4_linear(p: Projection[Int4Matrix]) -> Tensor:
    """``kernels.linear.linear`` with a 4-bit weight."""
    p = p.normalised()
    weight = p.weight
    if weight.order is not None:
        p = p._replace(x=p.x.index_select(1, weight.order))
    if len(p.x) <= SKINNY:
        return int4_skinny(choose_tile(len(p.x), len(weight.packed), shared_bytes(p.x)), p)
    return p.finish(F.linear(p.x, dequantize(weight, p.x.dtype), p.bias))


#: Of any number of rows, in blocks of ``SKINNY``: one program has all columns.
ORDERED = Tile(64, 1, 4, 4)


def ordered_int4_linear(p: Projection[Int4Matrix]) -> Tensor:
    """``kernels.linear.ordered_linear`` with a 4-bit weight."""
    p = p.normalised()
    if p.weight.order is not None:
        p = p._replace(x=p.x.index_select(1, p.weight.order))
    blocks = []
    for start in range(0, len(p.x), SKINNY):
        block = slice(start, start + SKINNY)
        residual = None if p.residual is None else p.residual[block]
        blocks.append(int4_skinny(ORDERED, p._replace(x=p.x[block], residual=residual)))
    if p.residual is not None:
        return p.residual
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


@triton.jit
def _dequantize(
    out,  # [N, K]
    packed,  # uint8 [N, K / 2]
    scale,  # [K / GROUP, N]
    zero,  # uint8 [K / GROUP, N]
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    HALF: tl.constexpr = BLOCK_K // 2
    DTYPE: tl.constexpr = out.dtype.element_ty
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, HALF)
    group = block * BLOCK_K // GROUP
    is_row = n < N
    mask = is_row[:, None]
    codes = tl.load(packed + n[:, None] * (K // 2) + block * HALF + half, mask)
    scales = tl.load(scale + group * N + n, is_row).to(tl.float32)[:, None]
    zeros = offset_codes(tl.load(zero + group * N + n, is_row), DTYPE)[:, None]
    low, high = unpack(codes, DTYPE)
    at = out + n[:, None] * K + block * BLOCK_K + half
    tl.store(at, (subtract(low, zeros, DTYPE).to(tl.float32) * scales).to(DTYPE), mask)
    tl.store(
        at + HALF,
        (subtract(high, zeros, DTYPE).to(tl.float32) * scales).to(DTYPE),
        mask,
    )


_launch = Launcher(_dequantize)


def dequantize(weight: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix as bfloat16 or float16 [N, K], columns in the order stored."""
    size, half = weight.packed.shape
    out = torch.empty(size, 2 * half, dtype=dtype, device=weight.packed.device)
    block_n = 32
    _launch(
        (cdiv(size, block_n), 2 * half // weight.block, 1),
        (out, weight.packed, weight.scale, weight.zero, size),
        (2 * half, weight.group, block_n, weight.block),
        4,
    )
    return out
