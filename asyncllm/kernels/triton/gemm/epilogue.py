"""What the projection kernels have in common: the rows of a program and what follows the product.

A program of a gated projection computes the gate and the other half of the same outputs, so its
rows of the weight come in two runs: BLOCK_N gate rows and, N / 2 rows further, BLOCK_N others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.triton.activation import activate


@triton.jit
def weight_rows(i, tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The weight's rows, int64, of the rows i of a tile; past the end, the last row again."""
    if GATED:
        n = tl.minimum(tile * BLOCK_N + i % BLOCK_N, N // 2 - 1)
        return (n + i // BLOCK_N * (N // 2)).to(tl.int64)
    else:
        return tl.minimum(tile * BLOCK_N + i, N - 1).to(tl.int64)


@triton.jit
def output_tile(
    out, tile, M, N, out_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr
):
    """Addresses of a tile [BLOCK_N, BLOCK_M] of the output, and which of them exist."""
    m = tl.arange(0, BLOCK_M)[None, :]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    return out + m.to(tl.int64) * out_stride + n, (m < M) & (n < (N // 2 if GATED else N))


@triton.jit
def finish(y, bias, tile, N, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr):
    """From the product of the program's rows, float32 [rows, BLOCK_M], to [BLOCK_N, BLOCK_M]."""
    GATED: tl.constexpr = ACT is not None
    if BIAS:
        rows = weight_rows(tl.arange(0, y.shape[0]), tile, N, BLOCK_N, GATED)
        y += tl.load(bias + rows).to(tl.float32)[:, None]
    if GATED:
        halves = tl.permute(tl.reshape(y, [2, BLOCK_N, y.shape[1]]), [1, 2, 0])
        first, second = tl.split(halves)
        y = activate(first, ACT) * second
    return y
