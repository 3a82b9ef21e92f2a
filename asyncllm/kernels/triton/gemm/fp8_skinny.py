"""Projections of few rows with an 8-bit weight, which is converted to the dtype of x in registers.

A program computes BLOCK_N outputs of all rows. The weight is the first operand, so that rows of x
are padded to a multiple of 8, not 16. The warps of a program divide the columns, which are the
leading dimension of the products.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.codes import fp8_numbers
from asyncllm.kernels.triton.gemm.epilogue import dot, weight_rows, write
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.types import Fp8Matrix

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


_launch = Launcher(_fp8_skinny)


def fp8_skinny(tile: Tile, p: Projection[Fp8Matrix]) -> Tensor:
    """Launch the kernel."""
    x, weight = p.x, p.weight
    out = p.output()
    size, columns = weight.data.shape
    block_n = tile.rows if p.act is None else tile.rows // 2
    block_m = max(8, next_power_of_2(len(x)))
    _launch(
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
