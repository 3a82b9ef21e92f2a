"""Projections with an 8-bit floating point weight (e4m3): their kernels, and which takes what.

One row is multiplied on the CUDA cores by the weight as it is stored. On Hopper GPUs, ``fp8_tiles``
takes dozens of rows, rounded to 8 bits. Elsewhere, up to 16 rows are multiplied in 16 bits, and
cuBLAS multiplies all others in 8 bits (docs/kernels.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.quantized import Fp8Rows
from asyncllm.kernels.triton.activation import gated_rows
from asyncllm.kernels.triton.codes import fp8_numbers
from asyncllm.kernels.triton.gemm.epilogue import dot, weight_rows, write
from asyncllm.kernels.triton.gemm.fp8_rows import quantize_rows
from asyncllm.kernels.triton.gemm.fp8_tiles import fp8_tiles
from asyncllm.kernels.triton.gemm.gemv import two_rows
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.tuning import Fp8Tile, choose_fp8_gemv_tile, choose_fp8_tile
from asyncllm.kernels.types import Fp8Matrix, Weight

#: Columns of a product, those of a block of scales.
COLUMNS = 128


class Tile(NamedTuple):
    """How a launch divides its work.

    Attributes:
        rows: of the weight, of a program.
        warps: of a program.
        stages: steps whose loads are in flight.
    """

    rows: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["M"])
def _fp8_skinny(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    x,  # [M, K]
    weight,  # e4m3 [N, K]
    scale,  # float32 [N], or [ceil(N / 128), ceil(K / 128)]
    bias,  # [N]
    M,
    N,
    out_stride,
    x_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_N if ACT is None else 2 * BLOCK_N
    STEP: tl.constexpr = WARPS * BLOCK_K
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0)
    rows = weight_rows(tl.arange(0, ROWS), tile, N, BLOCK_N, ACT is not None)
    m = tl.arange(0, BLOCK_M)
    warp = tl.arange(0, WARPS)[:, None]
    k = warp * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    w_at = weight + (rows * K)[None, :, None] + k[:, None, :]
    x_at = x + (m.to(tl.int64) * x_stride)[None, None, :] + k[:, :, None]
    s_at = scale + (rows // 128 * BLOCKS)[None, :] + warp
    has_row = (m < M)[None, None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros([WARPS, ROWS, BLOCK_M], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        if K % STEP == 0:
            w = tl.load(w_at + start, eviction_policy="evict_first")
            here = tl.load(x_at + start, has_row, other=0.0)
        else:
            w = tl.load(w_at + start, (start + k < K)[:, None, :], other=0.0)
            here = tl.load(x_at + start, has_row & (start + k < K)[:, :, None], other=0.0)
        w = fp8_numbers(w, here.dtype)
        if BLOCKED:
            block = start // BLOCK_K
            factor = tl.load(s_at + block, warp < BLOCKS - block, other=0.0)[:, :, None]
            acc += dot(w, here, tl.zeros_like(acc)) * factor
        else:
            acc = dot(w, here, acc)
    y = tl.sum(acc, axis=0)
    if not BLOCKED:
        y *= tl.load(scale + rows)[:, None]
    write(y, out, bias, tile, M, N, out_stride, BLOCK_M, BLOCK_N, BIAS, RESIDUAL, ACT)


_launch_skinny = Launcher(_fp8_skinny)


def fp8_skinny(tile: Tile, p: Projection[Fp8Matrix]) -> Tensor:
    """For few rows: the weight is converted to the dtype of x in registers.

    A program computes BLOCK_N outputs of all rows; its warps divide the columns. The weight is the
    first operand, so that rows of x are padded to a multiple of 8, not 16.
    """
    x, weight = p.x, p.weight
    out = p.output()
    size, columns = weight.data.shape
    block_n = tile.rows if p.act is None else tile.rows // 2
    block_m = max(8, next_power_of_2(len(x)))
    _launch_skinny(
        (cdiv(out.shape[1], block_n), 1, 1),
        (out, x, *weight, p.bias, len(x), size, out.stride(0), x.stride(0)),
        (
            *(columns, block_m, block_n, COLUMNS, tile.warps, tile.stages),
            *(weight.is_blocked, *p.epilogue),
        ),
        tile.warps,
    )
    return out


def choose_tile(size: int) -> Tile:
    """The measured best for a weight of ``size`` rows."""
    return Tile(32, 4, 3) if size >= 16384 else Tile(16, 4, 5)


@triton.jit
def _fp8_gemv(
    out,  # [1, N], or [1, N / 2] if gated; also the residual
    x,  # [1, K]
    weight,  # e4m3 [N, K]
    scale,  # float32 [N], or [ceil(N / 128), ceil(K / 128)]
    bias,  # [N]
    gain,  # [K]
    rest,  # [REST, K], in the dtype of x
    rest_out,  # [1, REST]
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    REST: tl.constexpr,
    BLOCKED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_N if ACT is None else 2 * BLOCK_N
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BLOCKS: tl.constexpr = (K + 127) // 128
    PIECES: tl.constexpr = BLOCK_K // 16  # of 16 bytes, which a thread loads at once
    RESTS: tl.constexpr = (REST + 1) // 2
    tile = tl.program_id(0) - RESTS
    if RESTS > 0:  # noqa: SIM102 (the inner condition is no constant)
        if tile < 0:
            two_rows(
                rest_out, x, rest, gain, tile + RESTS, REST, K, BLOCK_K, NORM, EPS, OFFSET, PDL
            )
            return
    rows = weight_rows(tl.arange(0, ROWS), tile, N, BLOCK_N, ACT is not None)
    k = tl.arange(0, BLOCK_K)
    weights: tl.tuple = ()
    gains: tl.tuple = ()
    factors: tl.tuple = ()
    for i in tl.static_range(CHUNKS):
        at = weight + rows[:, None] * K + (i * BLOCK_K + k)[None, :]
        if (i + 1) * BLOCK_K <= K:
            weights += (tl.load(at, eviction_policy="evict_first"),)
        else:
            weights += (tl.load(at, (i * BLOCK_K + k < K)[None, :], other=0.0),)
    for i in tl.static_range(CHUNKS):
        if BLOCKED:
            block = (i * BLOCK_K + tl.arange(0, PIECES) * 16)[None, :] // 128
            at = scale + (rows // 128 * BLOCKS)[:, None] + block
            factors += (tl.load(at, block < BLOCKS, other=0.0),)
        if NORM:
            gains += (tl.load(gain + i * BLOCK_K + k, i * BLOCK_K + k < K, other=0.0),)
    if not BLOCKED:
        factor = tl.load(scale + rows)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    sums = tl.zeros([ROWS, PIECES], tl.float32)
    products = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(CHUNKS):
        here = tl.load(x + i * BLOCK_K + k, i * BLOCK_K + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += here * here
            here *= (1.0 + gains[i].to(tl.float32)) if OFFSET else gains[i].to(tl.float32)
        if BLOCKED:
            # Scaled within each thread; threads are added up once, at the end.
            parts = tl.reshape(weights[i].to(tl.float32) * here[None, :], [ROWS, PIECES, 16])
            sums += tl.sum(parts, axis=2) * factors[i]
        else:
            products += weights[i].to(tl.float32) * here[None, :]
    y = tl.sum(sums, axis=1) if BLOCKED else tl.sum(products, axis=1) * factor
    if NORM:
        y *= tl.rsqrt(tl.sum(squares) / K + EPS)
    write(y[:, None], out, bias, tile, 1, N, 0, 1, BLOCK_N, BIAS, RESIDUAL, ACT)


_launch_gemv = Launcher(_fp8_gemv)


def fp8_gemv(p: Projection[Fp8Matrix], rest: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """For one row of x, on the CUDA cores: a program requests its whole weight before it waits.

    Args:
        rest: a weight in the dtype of x and its output, which other programs of the launch fill.
    """
    weight = p.weight
    out = p.output()
    size, columns = weight.data.shape
    tile = choose_fp8_gemv_tile(columns, blocked=weight.is_blocked)
    block_n = tile.rows if p.act is None else tile.rows // 2
    count = 0 if rest is None else len(rest[0])
    _launch_gemv(
        (cdiv(out.shape[1], block_n) + cdiv(count, 2), 1, 1),
        (out, p.x, *weight, p.bias, p.gain, *(rest or (None, None)), size),
        (columns, block_n, tile.columns, count, weight.is_blocked, *p.prologue, *p.epilogue),
        tile.warps,
    )
    return out


#: cuBLAS wants scales of blocks for a multiple of so many rows.
SCALES = 4
#: Up to this many rows, the weight is converted to the dtype of x.
SKINNY = 16


def fp8_linear(p: Projection[Fp8Matrix], given: Fp8Rows | None = None) -> Tensor:
    """``kernels.linear.linear`` with an 8-bit weight.

    Args:
        given: what x was rounded to.
    """
    if given is None and len(p.x) == 1:
        return fp8_gemv(p)
    tile = _tile_of(p)
    if given is None and tile is None and len(p.x) <= SKINNY:
        return fp8_skinny(choose_tile(len(p.weight.data)), p.normalised())
    x = given or _rounded(p)
    if tile is not None:
        return fp8_tiles(tile, p, x.data, x.scale)
    return p.finish(_product(x, p))


def fp8_gated(p: Projection[Fp8Matrix], then: Weight) -> Tensor | Fp8Rows:
    """``kernels.linear.gated_linear`` with an 8-bit weight."""
    if not isinstance(then, Fp8Matrix) or not then.is_blocked:
        return fp8_linear(p)
    if len(p.x) <= SKINNY or _tile_of(p) is not None:
        return fp8_linear(p)
    assert p.act is not None
    return gated_rows(_product(_rounded(p), p), p.act, SCALES)


def _tile_of(p: Projection[Fp8Matrix]) -> Fp8Tile | None:
    data = p.weight.data
    if not (p.x.is_cuda and gpu_of(p.x.device).is_hopper and data.data_ptr() % 16 == 0):
        return None
    return choose_fp8_tile(len(p.x), *data.shape)


def _rounded(p: Projection[Fp8Matrix]) -> Fp8Rows:
    blocked = p.weight.is_blocked
    multiple = SCALES if blocked else 1
    data, scale = quantize_rows(p.x, norm=p.norm, blocked=blocked, multiple=multiple)
    return Fp8Rows(data, scale.t(), len(p.x), p.x.dtype)


def _product(x: Fp8Rows, p: Projection[Fp8Matrix]) -> Tensor:
    """By cuBLAS, with the bias."""
    y = scaled_mm(x.data, x.scale.t(), p.weight, x.dtype)[: x.rows]
    if p.bias is not None:
        y += p.bias
    return y


def scaled_mm(data: Tensor, scale: Tensor, weight: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    """The product of two e4m3 matrices: [M, N] of ``dtype``."""
    y = torch._scaled_mm(
        data,
        weight.data.t(),
        scale_a=scale,
        scale_b=weight.scale.t(),
        out_dtype=torch.bfloat16,
    )
    return y.to(dtype)
