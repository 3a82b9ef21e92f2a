"""Projections of one row with an 8-bit weight, on the CUDA cores.

A program computes BLOCK_N outputs, and requests all of its weight, into registers, before it waits
for the kernel that writes x.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.gemm.epilogue import weight_rows, write
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.types import Fp8Matrix

ROWS, COLUMNS, WARPS = 4, 2048, 4  # of a program; COLUMNS are loaded at once


@triton.jit
def _fp8_gemv(
    out,  # [1, N], or [1, N / 2] if gated; also the residual
    x,  # [1, K]
    weight,  # e4m3 [N, K]
    scale,  # float32 [N], or [ceil(N / 128), ceil(K / 128)]
    bias,  # [N]
    gain,  # [K]
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    SCALES: tl.constexpr = BLOCK_K // 128
    tile = tl.program_id(0)
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
            block = i * SCALES + tl.arange(0, SCALES)[None, :]
            at = scale + (rows // 128 * BLOCKS)[:, None] + block
            factors += (tl.load(at, block < BLOCKS, other=0.0),)
        if NORM:
            gains += (tl.load(gain + i * BLOCK_K + k, i * BLOCK_K + k < K, other=0.0),)
    if not BLOCKED:
        factor = tl.load(scale + rows)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    y = tl.zeros([ROWS], tl.float32)
    products = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(CHUNKS):
        here = tl.load(x + i * BLOCK_K + k, i * BLOCK_K + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += here * here
            here *= (1.0 + gains[i].to(tl.float32)) if OFFSET else gains[i].to(tl.float32)
        if BLOCKED:
            parts = tl.reshape(weights[i].to(tl.float32) * here[None, :], [ROWS, SCALES, 128])
            y += tl.sum(tl.sum(parts, axis=2) * factors[i], axis=1)
        else:
            products += weights[i].to(tl.float32) * here[None, :]
    if not BLOCKED:
        y = tl.sum(products, axis=1) * factor
    if NORM:
        y *= tl.rsqrt(tl.sum(squares) / K + EPS)
    write(y[:, None], out, bias, tile, 1, N, 0, 1, BLOCK_N, BIAS, RESIDUAL, ACT)


_launch = Launcher(_fp8_gemv)


def fp8_gemv(p: Projection[Fp8Matrix]) -> Tensor:
    """Launch the kernel for one row of x."""
    weight = p.weight
    out = p.output()
    size, columns = weight.data.shape
    block_n = ROWS if p.act is None else ROWS // 2
    _launch(
        (cdiv(out.shape[1], block_n), 1, 1),
        (out, p.x, *weight, p.bias, p.gain, size),
        (columns, block_n, COLUMNS, weight.is_blocked, *p.prologue, *p.epilogue),
        WARPS,
    )
    return out
