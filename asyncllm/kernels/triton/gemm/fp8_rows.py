"""Rows of activations in 8 bits (e4m3), for products with an fp8 weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.codes import fp8_codes
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.types import FP8_BLOCK, Norm


@triton.jit(do_not_specialize=["M"])
def _quantize(
    data,  # e4m3 [rows, K]
    scale,  # float32 [K / SIZE, rows]
    x,  # [M, K]
    gain,  # [K]
    M,
    x_stride,
    K: tl.constexpr,
    EPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for [GROUPS, SIZE] elements of a row, all if there is a norm; a scale for each
    group."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = k < K
    values = tl.load(x + row * x_stride + k, inside & (row < M), other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(values * values) / K
        factor = tl.load(gain + k, inside, other=0.0)
        values *= tl.rsqrt(mean + EPS)
        if OFFSET is None:
            values = values.to(x.dtype.element_ty).to(tl.float32) * factor.to(tl.float32)
        else:
            values *= factor.to(tl.float32) + OFFSET
        values = values.to(x.dtype.element_ty).to(tl.float32)
    codes, size = fp8_codes(values)
    tl.store(data + row * K + k, codes, inside)
    at = scale + group[:, None] * tl.num_programs(0) + row
    tl.store(at, size, group[:, None] * SIZE < K)


_launch = Launcher(_quantize)

#: Up to so many rows, a program that needs no other columns has so many.
FEW_ROWS, PIECE = 256, 1024


def quantize_rows(
    x: Tensor, *, norm: Norm | None = None, blocked: bool = False, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Round x to e4m3, scaled so that the largest element becomes 448.

    Args:
        x: [M, K]; rows contiguous. K is a multiple of FP8_BLOCK if ``blocked``.
        norm: x is normalised first.
        blocked: a scale for each FP8_BLOCK columns of a row, not for the row.
        multiple: rows of zeros are appended up to a multiple of this number.

    Returns:
        float8_e4m3fn [M, K], and the float32 scales: [M, 1] or [M, K / FP8_BLOCK], of which those
        of one block of columns are contiguous.
    """
    columns = x.shape[1]
    rows = cdiv(len(x), multiple) * multiple
    groups = columns // FP8_BLOCK if blocked else 1
    width = next_power_of_2(columns)
    warps = min(max(width // 512, 1), 8)
    if blocked and norm is None and rows <= FEW_ROWS:
        width, warps = min(width, PIECE), 4
    gain, eps, offset = norm or (None, 0.0, None)
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    tile = (width // FP8_BLOCK, FP8_BLOCK) if blocked else (1, width)
    _launch(
        (rows, cdiv(columns, width), 1),
        (data, scale, x, gain, len(x), x.stride(0)),
        (columns, eps, *tile, norm is not None, offset),
        warps,
    )
    return data, scale.t()
