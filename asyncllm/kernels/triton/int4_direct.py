"""Products of few rows with a 4-bit weight; see ``fragments``."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.int4 import Int4Matrix
from asyncllm.kernels.norm import Norm
from asyncllm.kernels.triton.epilogue import finish, weight_rows
from asyncllm.kernels.triton.fragments import (
    dot,
    input_operand,
    input_places,
    squares,
    tile_rows,
    weight_operand,
)
from asyncllm.kernels.triton.int4_codes import offset_codes, subtract, unpack
from asyncllm.kernels.triton.launch import Launcher


class Tile(NamedTuple):
    """How a launch divides its work.

    Attributes:
        block_n: outputs of a program; at least 16, or 8 of a gated projection.
        warps: of a program.
        held: pieces of 128 columns, for each warp, that are loaded ahead.
    """

    block_n: int
    warps: int
    held: int


@triton.jit(do_not_specialize=["M"])
def _int4_direct(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    x,  # [M, K]
    packed,  # uint8 [N, K / 2], in blocks of 128 columns
    scale,  # [K / GROUP, N]
    zero,  # uint8 [K / GROUP, N]
    bias,  # [N]
    gain,  # [K]
    M,
    N,
    out_stride,
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    HELD: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    ROWS: tl.constexpr = BLOCK_N if ACT is None else 2 * BLOCK_N
    STEPS: tl.constexpr = K // 128 // WARPS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    row, warp = tile_rows(tile, N, BLOCK_N, ROWS, WARPS, ACT is not None)
    p_at = packed + (row * (K // 2) + warp * 64)[:, None] + tl.arange(0, 64)[None, :]
    held: tl.tuple = ()
    for i in tl.static_range(min(HELD, STEPS)):
        held += (tl.load(p_at + i * (WARPS * 64), eviction_policy="evict_first"),)
    rows = weight_rows(tl.arange(0, ROWS), tile, N, BLOCK_N, ACT is not None)
    m, column, has_row = input_places(M, 128, BLOCK_M, WARPS)
    x_at = x + m * x_stride + column
    gain_at = gain + column if NORM else x_at
    acc = tl.zeros([WARPS, ROWS, BLOCK_M], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    if NORM:
        squared = squares(x, K)
    for i in tl.static_range(STEPS):
        at = ((i * WARPS + tl.arange(0, WARPS)) * 128 // GROUP)[:, None] * N + rows[None, :]
        factor = tl.load(scale + at).to(tl.float32)[:, :, None]
        offset = offset_codes(tl.load(zero + at), DTYPE)[:, :, None]
        start = i * (WARPS * 128)
        first = input_operand(
            x_at + start, gain_at + start, has_row, BLOCK_M, WARPS, NORM, PDL
        )  # fmt: skip
        start += 64
        second = input_operand(
            x_at + start, gain_at + start, has_row, BLOCK_M, WARPS, NORM, PDL
        )  # fmt: skip
        low, high = unpack(held[i], DTYPE, PDL)
        if i + HELD < STEPS:
            held += (tl.load(p_at + (i + HELD) * (WARPS * 64), eviction_policy="evict_first"),)
        low = subtract(weight_operand(low, ROWS, WARPS), offset, DTYPE, PDL)
        high = subtract(weight_operand(high, ROWS, WARPS), offset, DTYPE, PDL)
        product = dot(low, first, tl.zeros_like(acc), PDL)
        acc += dot(high, second, product, PDL) * factor
    y = tl.sum(acc, axis=0)
    if NORM:
        y *= tl.rsqrt(tl.sum(squared) / K + EPS)
    finish(y, out, bias, tile, M, N, out_stride, BLOCK_M, BLOCK_N, BIAS, RESIDUAL, ACT)


_launch = Launcher(_int4_direct)


def int4_direct(
    tile: Tile,
    x: Tensor,
    weight: Int4Matrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``int4_linear`` of few rows, whose columns are in the order of the weight's.

    Groups are multiples of 128 columns, and columns are 128 for each warp, or a multiple of that.
    A norm is for one row, and without offset: see ``takes_norm``.
    """
    size, columns = weight.packed.shape[0], x.shape[1]
    outputs = size if act is None else size // 2
    out = x.new_empty(len(x), outputs) if residual is None else residual
    gain, eps, _ = norm or (None, 0.0, False)
    block_m = max(8, triton.next_power_of_2(len(x)))
    arrays = (weight.packed, weight.scale, weight.zero)
    _launch(
        (triton.cdiv(outputs, tile.block_n), 1, 1),
        (out, x, *arrays, bias, gain, len(x), size, out.stride(0), x.stride(0)),
        (
            *(columns, weight.group, block_m, tile.block_n, tile.warps, tile.held),
            *(norm is not None, eps, bias is not None, residual is not None, act),
        ),
        tile.warps,
    )
    return out


def choose_tile(rows: int, outputs: int, columns: int, group: int) -> Tile | None:
    """The best division of the work as measured; None if there is none."""
    if group % 128:
        return None
    warps = next(warps for warps in (8, 4, 2, 1) if columns % (128 * warps) == 0)
    return Tile(16, warps, 12 if rows <= 8 else 8)
