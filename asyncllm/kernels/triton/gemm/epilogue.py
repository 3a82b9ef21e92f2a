"""Parts of the projection kernels in Triton: which rows a program has, and the way to the output.

A program of a gated projection computes gate and up of the same outputs. So its rows of the weight
are two runs: BLOCK_N rows of the gate and, N / 2 rows further, BLOCK_N rows of up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.launch import NATIVE


@triton.jit
def weight_rows(i, tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The weight's rows, int64, of rows i of a tile; past the end, the last row again."""
    if GATED:
        n = tl.minimum(tile * BLOCK_N + i % BLOCK_N, N // 2 - 1)
        return (n + i // BLOCK_N * (N // 2)).to(tl.int64)
    else:
        return tl.minimum(tile * BLOCK_N + i, N - 1).to(tl.int64)


@triton.jit
def output_tile(
    out, tile, M, N, out_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr
):
    """Addresses of a tile [BLOCK_N, BLOCK_M] of the output, and a mask of those that exist."""
    m = tl.arange(0, BLOCK_M)[None, :]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    return out + m.to(tl.int64) * out_stride + n, (m < M) & (n < (N // 2 if GATED else N))


@triton.jit
def finish(y, bias, tile, N, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr):
    """Bias and activation: from products, float32 [rows, BLOCK_M], to [BLOCK_N, BLOCK_M]."""
    GATED: tl.constexpr = ACT is not None
    if BIAS:
        rows = weight_rows(tl.arange(0, y.shape[0]), tile, N, BLOCK_N, GATED)
        y += tl.load(bias + rows).to(tl.float32)[:, None]
    if GATED:
        halves = tl.permute(tl.reshape(y, [2, BLOCK_N, y.shape[1]]), [1, 2, 0])
        first, second = tl.split(halves)
        y = activate(first, ACT) * second
    return y


@triton.jit
def write(
    y, out, bias, tile, M, N, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """``finish`` products, add the residual, and store them."""
    at, is_output = output_tile(out, tile, M, N, out_stride, BLOCK_M, BLOCK_N, ACT is not None)
    y = finish(y, bias, tile, N, BLOCK_N, BIAS, ACT)
    if RESIDUAL:
        y += tl.load(at, is_output, other=0.0).to(tl.float32)
    tl.store(at, y.to(out.dtype.element_ty), is_output)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b; in float32 in the interpreter, which cannot multiply bfloat16."""
    if NATIVE:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
