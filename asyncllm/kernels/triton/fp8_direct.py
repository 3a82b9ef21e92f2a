"""Products of few rows with an 8-bit weight; see ``fragments``."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.fp8 import Fp8Matrix
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
from asyncllm.kernels.triton.launch import Launcher


class Tile(NamedTuple):
    """How a launch divides its work.

    Attributes:
        block_n: outputs of a program; at least 16, or 8 of a gated projection.
        warps: of a program.
        held: pieces of 64 columns, for each warp, that are loaded ahead.
    """

    block_n: int
    warps: int
    held: int


@triton.jit
def _convert(w, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 to DTYPE, exactly.

    To bfloat16 there is no instruction: sign, exponent and mantissa take their places there, and
    2^120 makes up for the difference of the exponents' biases.
    """
    if NATIVE and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, rest, factor;
            mov.b32 factor, 0x7B807B80;
            prmt.b32 first, $2, 0, 0x1404;
            prmt.b32 second, $2, 0, 0x3424;
            shr.u32 rest, first, 4;
            and.b32 rest, rest, 0x07F007F0;
            lop3.b32 first, first, 0x80008000, rest, 0xEA;
            mul.rn.bf16x2 $0, first, factor;
            shr.u32 rest, second, 4;
            and.b32 rest, rest, 0x07F007F0;
            lop3.b32 second, second, 0x80008000, rest, 0xEA;
            mul.rn.bf16x2 $1, second, factor;
            }""",
            "=&r,=&r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return w.to(DTYPE)


@triton.jit(do_not_specialize=["M"])
def _fp8_direct(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    x,  # [M, K]
    weight,  # e4m3 [N, K]
    scale,  # float32 [N], or [ceil(N / 128), K / 128]
    bias,  # [N]
    gain,  # [K]
    M,
    N,
    out_stride,
    x_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    HELD: tl.constexpr,
    BLOCKED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    ROWS: tl.constexpr = BLOCK_N if ACT is None else 2 * BLOCK_N
    STEP: tl.constexpr = WARPS * 64
    STEPS: tl.constexpr = K // STEP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    row, warp = tile_rows(tile, N, BLOCK_N, ROWS, WARPS, ACT is not None)
    w_at = weight + (row * K + warp * 64)[:, None] + tl.arange(0, 64)[None, :]
    held: tl.tuple = ()
    for i in tl.static_range(min(HELD, STEPS)):
        held += (tl.load(w_at + i * STEP, eviction_policy="evict_first"),)
    rows = weight_rows(tl.arange(0, ROWS), tile, N, BLOCK_N, ACT is not None)
    s_at = scale + (rows // 128 * (K // 128))[None, :]
    m, column, has_row = input_places(M, 64, BLOCK_M, WARPS)
    x_at = x + m * x_stride + column
    gain_at = gain + column if NORM else x_at
    acc = tl.zeros([WARPS, ROWS, BLOCK_M], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    if NORM:
        squared = squares(x, K)
    for i in tl.static_range(STEPS):
        start = i * STEP
        v = input_operand(x_at + start, gain_at + start, has_row, BLOCK_M, WARPS, NORM, PDL)
        w = weight_operand(_convert(held[i], DTYPE, PDL), ROWS, WARPS)
        if i + HELD < STEPS:
            held += (tl.load(w_at + (i + HELD) * STEP, eviction_policy="evict_first"),)
        if BLOCKED:
            block = (i * STEP + tl.arange(0, WARPS) * 64) // 128
            factor = tl.load(s_at + block[:, None])[:, :, None]
            acc += dot(w, v, tl.zeros_like(acc), PDL) * factor
        else:
            acc = dot(w, v, acc, PDL)
    y = tl.sum(acc, axis=0)
    if NORM:
        y *= tl.rsqrt(tl.sum(squared) / K + EPS)
    if not BLOCKED:
        y *= tl.load(scale + rows)[:, None]
    finish(y, out, bias, tile, M, N, out_stride, BLOCK_M, BLOCK_N, BIAS, RESIDUAL, ACT)


_launch = Launcher(_fp8_direct)


def fp8_direct(
    tile: Tile,
    x: Tensor,
    weight: Fp8Matrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``fp8_linear`` of few rows: the weight is converted to the dtype of x in registers.

    Columns are a multiple of 128, and of 64 for each warp. A norm is for one row, and without
    offset: what is not can be had cheaper from ``rms_norm``.
    """
    size, columns = weight.data.shape
    outputs = size if act is None else size // 2
    out = x.new_empty(len(x), outputs) if residual is None else residual
    gain, eps, _ = norm or (None, 0.0, False)
    block_m = max(8, triton.next_power_of_2(len(x)))
    _launch(
        (triton.cdiv(outputs, tile.block_n), 1, 1),
        (out, x, *weight, bias, gain, len(x), size, out.stride(0), x.stride(0)),
        (
            *(columns, block_m, tile.block_n, tile.warps, tile.held),
            *(
                weight.is_blocked,
                norm is not None,
                eps,
                bias is not None,
                residual is not None,
                act,
            ),
        ),
        tile.warps,
    )
    return out


def choose_tile(rows: int, outputs: int, columns: int) -> Tile | None:
    """The best division of the work as measured; None if there is none."""
    if columns % 128:
        return None
    warps = next(warps for warps in (8, 4, 2) if columns % (64 * warps) == 0)
    return Tile(16, warps, 12 if rows <= 8 else 8)
