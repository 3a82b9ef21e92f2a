"""What the kernels with quantised weights have in common."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.triton.gemm.epilogue import finish, output_tile


@triton.jit
def dot(a, b, acc, NATIVE: tl.constexpr):
    """acc + a @ b; the interpreter knows no products of bfloat16."""
    if NATIVE:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def write(
    y, out, bias, tile, M, N, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """From the product of a program's rows, float32 [rows, BLOCK_M], to the output."""
    at, is_output = output_tile(out, tile, M, N, out_stride, BLOCK_M, BLOCK_N, ACT is not None)
    y = finish(y, bias, tile, N, BLOCK_N, BIAS, ACT)
    if RESIDUAL:
        y += tl.load(at, is_output, other=0.0).to(tl.float32)
    tl.store(at, y.to(out.dtype.element_ty), is_output)
