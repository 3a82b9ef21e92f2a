"""Projections of which each row has the same bits in any batch.

Every output is one chain of products along the columns, which the tensor cores add up in float32,
16 at a time and in order. No kernel here cuts the columns into parts; tiles differ by the number of
rows, which changes no sum. Another kernel normalises x. Bias, activation and residual are computed
in float32, before the only rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.triton.gemm.epilogue import dot, weight_rows, write
from asyncllm.kernels.triton.gemm.fp8_rows import quantize_rows
from asyncllm.kernels.triton.gemm.fp8_tiles import fp8_tiles
from asyncllm.kernels.triton.gemm.int4 import ordered_int4_linear
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.gemm.tma import tma_gemm
from asyncllm.kernels.triton.gemm.tma_split import MOST_ROWS, tma_split_gemm
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.tuning import (
    SHARED_BYTES,
    TmaSplitTile,
    TmaTile,
    fp8_tile,
    tma_split_stages,
    tma_stages,
)
from asyncllm.kernels.types import Fp8Matrix, Int4Matrix, Norm, Weight

#: Programs that run at the same time.
PROGRAMS = 132
#: From here on programs have a warpgroup for every 64 rows of the weight.
MANY_ROWS = 64


def ordered_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See ``kernels.linear.ordered_linear``."""
    if isinstance(weight, Fp8Matrix):
        return _fp8(Projection(x, weight, bias, norm, residual, act))
    if isinstance(weight, Int4Matrix):
        return ordered_int4_linear(Projection(x, weight, bias, norm, residual, act))
    p = Projection(x, weight, bias, norm, residual, act, dtype).normalised()
    if not _can_stream(p):
        return _ordered_gemm(p)
    size, columns = weight.shape
    if len(x) <= MANY_ROWS:
        return tma_gemm(choose_few(len(x), size, columns), p)
    tile, most_rows = choose_many(len(x), size, columns)
    return tma_split_gemm(tile, p, most_rows)


def _fp8(p: Projection[Fp8Matrix]) -> Tensor:
    """Rows are rounded, however few they are. Splits are those of the weight."""
    rows, weight = len(p.x), p.weight
    data, scale = quantize_rows(p.x, norm=p.norm, blocked=weight.is_blocked)
    return fp8_tiles(fp8_tile(rows, *weight.data.shape), p, data, scale.t())


def choose_few(rows: int, size: int, columns: int) -> TmaTile:
    """The tile for up to ``MANY_ROWS`` rows of a weight [size, columns]."""
    tiles = cdiv(size, 64)
    parts = 3 if tiles >= 300 else 1
    x_rows = max(8, next_power_of_2(rows))
    widest = 256 if x_rows == 8 and parts == 1 and columns >= 1024 else 128
    block_k = next(size for size in (widest, 128, 64) if columns % size == 0)
    most = columns // block_k
    if parts == 3:
        stages = min(tma_stages(rows, parts, 1, block_k, 3, SHARED_BYTES), most)
        return TmaTile(parts, 1, block_k, 1, stages, min(3, stages))
    # Programs are few: each has all blocks of x on their way that it has of the weight.
    stages = min((SHARED_BYTES - 256 * x_rows) // (2 * block_k * (64 + x_rows)), most)
    return TmaTile(parts, 1, block_k, 1, stages, stages)


def choose_many(rows: int, size: int, columns: int) -> tuple[TmaSplitTile, int]:
    """The tile for more rows, and the most rows of a program.

    There are programs for all multiprocessors, if that is possible: smaller ones, then.
    """
    tiles, most, parts = cdiv(size, 64), MOST_ROWS, 1
    if rows <= MOST_ROWS:
        if tiles <= PROGRAMS // 2:
            most = cdiv(rows, 64) * 32
        parts = 1 if tiles <= 2 * PROGRAMS else 3
    elif tiles * cdiv(rows, MOST_ROWS) > PROGRAMS:
        parts = 2
    stages = min(tma_split_stages(min(rows, most), parts), columns // 64)
    return TmaSplitTile(parts, 1, stages), most


def _can_stream(p: Projection[Tensor]) -> bool:
    """Whether the kernels for Hopper GPUs take a projection."""
    x, weight = p.x, p.weight
    size, columns = weight.shape
    if not x.is_cuda or not gpu_of(x.device).is_hopper or x.element_size() != 2:
        return False
    is_aligned = all(t.data_ptr() % 16 == 0 for t in (x, weight)) and x.stride(0) % 8 == 0
    is_whole = columns % 64 == 0 and columns >= 256 and size % (16 if p.act else 8) == 0
    return is_aligned and is_whole and (p.dtype in (None, x.dtype) or len(x) <= MANY_ROWS)


@triton.jit(do_not_specialize=["M"])
def _ordered(
    out,
    x,
    weight,
    bias,
    M,
    N,
    x_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACT is not None
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_M
    columns = tl.arange(0, BLOCK_K)
    n = weight_rows(tl.arange(0, ROWS), tile, N, BLOCK_N, GATED)
    m = tl.minimum(first + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    w_at = weight + n[:, None] * K + columns[None, :]
    x_at = x + m[None, :] * x_stride + columns[:, None]
    sums = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for k in range(0, K, BLOCK_K):
        exists = k + columns < K
        w = tl.load(w_at + k, mask=exists[None, :], other=0.0)
        sums = dot(w, tl.load(x_at + k, mask=exists[:, None], other=0.0), sums)
    write(
        sums, out + first.to(tl.int64) * out_stride, bias, tile, M - first, N, out_stride,
        BLOCK_M, BLOCK_N, BIAS, RESIDUAL, ACT,
    )  # fmt: skip


_launch = Launcher(_ordered)


def _ordered_gemm(p: Projection[Tensor]) -> Tensor:
    """The kernel for all GPUs and shapes."""
    out = p.output()
    size, columns = p.weight.shape
    block_m = min(max(next_power_of_2(len(p.x)), 16), 64)
    block_n = 64 if p.act is None else 32
    tiles = cdiv(size, 64), cdiv(len(p.x), block_m), 1
    args = out, p.x, p.weight, p.bias, len(p.x), size, p.x.stride(0), out.stride(0)
    _launch(tiles, args, (columns, block_m, block_n, 64, *p.epilogue), 4, 4)
    return out
