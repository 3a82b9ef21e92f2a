"""Products of few rows with a quantised weight, on the tensor cores and straight from registers.

Every thread loads 16 bytes of the weight at a time, which stand for 16 or 32 columns of a row, and
of x the elements that meet those. Once converted that is what it holds of the operands of a
product, as columns may come in any order that is the same for both. Nothing goes through shared
memory but the sum over the warps, which divide the columns among them.

Of 64 columns, thread t of the four that share a row has those from 16 t on. A product takes eight
of them at a time: of the 32 columns that it has then, four from 4 t on and four from 16 + 4 t on.
That is how Triton arranges operands whose elements were bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.norm import Norm
from asyncllm.kernels.triton.epilogue import weight_rows


def takes_norm(x: Tensor, norm: Norm) -> bool:
    """Whether a kernel can normalise x as it reads it, at little cost.

    It multiplies x by the norm's weight first, in the dtype of x, and by 1 / rms at the end. Of
    several rows every program would have to sum up all squares.
    """
    return len(x) == 1 and not norm.offset and x.dtype == norm.weight.dtype == torch.bfloat16


@triton.jit
def tile_rows(
    tile,
    N,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    GATED: tl.constexpr,
):
    """For each row of the tiles that ``weight_operand`` takes: the weight's row, and the warp."""
    i = tl.arange(0, ROWS * WARPS)
    row = i // (WARPS * 8) * 8 + i % 8
    return weight_rows(row, tile, N, BLOCK_N, GATED), i // 8 % WARPS


@triton.jit
def weight_operand(t, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """[ROWS * WARPS, 64] -> [WARPS, ROWS, 64], within each thread."""
    t = tl.reshape(t, [ROWS // 8, WARPS, 8, 4, 2, 2, 4])
    return tl.reshape(tl.permute(t, [1, 0, 2, 4, 5, 3, 6]), [WARPS, ROWS, 64])


@triton.jit
def input_places(M, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    """Where ``input_operand`` begins to read: rows and columns of x, and which rows there are.

    The columns of a warp begin COLUMNS after those of the warp before it.
    """
    i = tl.arange(0, BLOCK_M * WARPS)
    m = i // (WARPS * 8) * 8 + i % 8
    k = tl.arange(0, 32)
    column = (i // 8 % WARPS * COLUMNS)[:, None] + (k // 8 * 16 + k % 8)[None, :]
    return m.to(tl.int64)[:, None], column, (m < M)[:, None]


@triton.jit
def _times(a, b, NATIVE: tl.constexpr):
    """a * b; the interpreter knows no arithmetic of bfloat16."""
    if NATIVE:
        return a * b
    else:
        return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def input_operand(
    at, gain_at, has_row,
    BLOCK_M: tl.constexpr, WARPS: tl.constexpr, NORM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Load [WARPS, 64, BLOCK_M] of x, and multiply it by the gain of its columns if NORM."""
    first = tl.load(at, has_row, other=0.0)
    second = tl.load(at + 8, has_row, other=0.0)
    if NORM:
        first = _times(first, tl.load(gain_at), NATIVE)
        second = _times(second, tl.load(gain_at + 8), NATIVE)
    t = tl.reshape(tl.join(first, second), [BLOCK_M // 8, WARPS, 8, 4, 2, 4, 2])
    return tl.reshape(tl.permute(t, [1, 6, 4, 3, 5, 0, 2]), [WARPS, 64, BLOCK_M])


@triton.jit
def squares(x, K: tl.constexpr):
    """Of one row of x, in float32, to be summed up."""
    WIDTH: tl.constexpr = triton.next_power_of_2(K)
    k = tl.arange(0, WIDTH)
    row = tl.load(x + k, k < K, other=0.0).to(tl.float32)
    return row * row


@triton.jit
def dot(a, b, acc, NATIVE: tl.constexpr):
    """acc + a @ b; the interpreter knows no products of bfloat16."""
    if NATIVE:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
