"""Projections of one row, on the CUDA cores.

A program computes BLOCK_N outputs from whole rows of the weight, all of which it requests, into
registers, before it waits for the kernel that writes x. The norm's 1 / rms is applied to the
products; the sum of squares is computed from the registers of x.

On an H200, large weights are read at 4.3 TB/s: 267 us for 151,936 x 4,096, where cuBLAS takes 286
(docs/kernels.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.gemm.epilogue import finish, output_tile, weight_rows
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.tuning import GemvTile


@triton.jit
def _gemv(
    out,  # [1, N], or [1, N / 2] if gated; also the residual
    x,  # [1, K]
    weight,  # [N, K]
    bias,  # [N]
    gain,  # [K]
    N,
    weight_stride,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL_LATE: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACT is not None
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    if PDL and not PDL_LATE:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    rows = weight_rows(tl.arange(0, ROWS), tile, N, BLOCK_N, GATED)
    k = tl.arange(0, BLOCK_K)
    at = weight + rows[:, None] * weight_stride + k[None, :]
    weights: tl.tuple = ()
    for i in tl.static_range(CHUNKS):
        if (i + 1) * BLOCK_K <= K:
            weights += (tl.load(at + i * BLOCK_K, eviction_policy="evict_first"),)
        else:
            inside = (i * BLOCK_K + k < K)[None, :]
            weights += (
                tl.load(at + i * BLOCK_K, inside, other=0.0, eviction_policy="evict_first"),
            )
    gains: tl.tuple = ()
    if NORM:
        for i in tl.static_range(CHUNKS):
            gains += (tl.load(gain + i * BLOCK_K + k, i * BLOCK_K + k < K, other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_wait()

    out_at, is_output = output_tile(out, tile, 1, N, 0, 1, BLOCK_N, GATED)
    if RESIDUAL:
        old = tl.load(out_at, is_output, other=0.0)
    xs: tl.tuple = ()
    for i in tl.static_range(CHUNKS):
        xs += (tl.load(x + i * BLOCK_K + k, i * BLOCK_K + k < K, other=0.0),)
    if PDL and PDL_LATE:
        tl.extra.cuda.gdc_launch_dependents()
    products = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(CHUNKS):
        here = xs[i].to(tl.float32)
        if NORM:
            squares += here * here
            factor = gains[i].to(tl.float32)
            here *= (1.0 + factor) if OFFSET else factor
        products += weights[i].to(tl.float32) * here[None, :]
    y = tl.sum(products, axis=1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares) / K + EPS)
    y = finish(y[:, None], bias, tile, N, BLOCK_N, BIAS, ACT)
    if RESIDUAL:
        y += old.to(tl.float32)
    tl.store(out_at, y.to(out.dtype.element_ty), is_output)


@triton.jit
def two_rows(
    out,  # [1, N]
    x,  # [1, K]
    weight,  # [N, K], in the dtype of x
    gain,  # [K]
    tile,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """What a program computes that belongs to a launch of another kernel: two outputs."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rows = 2 * tile + tl.arange(0, 2)
    k = tl.arange(0, BLOCK_K)
    weights: tl.tuple = ()
    for i in tl.static_range(CHUNKS):
        at = weight + rows[:, None] * K + (i * BLOCK_K + k)[None, :]
        inside = (rows < N)[:, None] & (i * BLOCK_K + k < K)[None, :]
        weights += (tl.load(at, inside, other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    products = tl.zeros([2, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(CHUNKS):
        inside = i * BLOCK_K + k < K
        here = tl.load(x + i * BLOCK_K + k, inside, other=0.0).to(tl.float32)
        if NORM:
            squares += here * here
            factor = tl.load(gain + i * BLOCK_K + k, inside, other=0.0).to(tl.float32)
            here *= (1.0 + factor) if OFFSET else factor
        products += weights[i].to(tl.float32) * here[None, :]
    y = tl.sum(products, axis=1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares) / K + EPS)
    tl.store(out + rows, y.to(out.dtype.element_ty), rows < N)


_launch = Launcher(_gemv)


def gemv(tile: GemvTile, p: Projection[Tensor]) -> Tensor:
    """Launch the kernel for one row of x."""
    weight = p.weight
    out = p.output()
    constants = (
        *(weight.shape[1], tile.block_n, tile.block_k, tile.pdl_late),
        *(*p.prologue, *p.epilogue),
    )
    args = (out, p.x, weight, p.bias, p.gain, weight.shape[0], weight.stride(0))
    _launch((cdiv(out.shape[1], tile.block_n), 1, 1), args, constants, tile.warps)
    return out
