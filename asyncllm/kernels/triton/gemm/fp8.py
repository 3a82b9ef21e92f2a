"""Projections with an 8-bit floating point weight (e4m3), in Triton and by cuBLAS.

Measured on an H200, Qwen3-8B's projections, µs, in CUDA graphs over weights that do not fit into
the L2 cache; the floor is reading the weight at 4.3 TB/s. Scales (a) of rows, (b) of blocks.

| rows | kernel | qkv 6144 x 4096 | o 4096 x 4096 | gate_up 24576 x 4096 | down 4096 x 12288 |
|--|--|--|--|--|--|
| | floor of fp8 (of bfloat16) | 5.9 (11.7) | 3.9 (7.8) | 23.4 (46.8) | 11.7 (23.4) |
| 1 | ``fp8_gemv`` (a) / (b) | 8.0 / 8.4 | 6.4 / 6.3 | 29.6 / 25.9 | 15.8 / 18.6 |
| 1 | cuBLAS in bfloat16 | 16.1 | 12.6 | 48.5 | 29.0 |
| 8 | ``fp8_skinny`` (a) / (b) | 10.2 / 10.7 | 9.4 / 9.8 | 30.5 / 30.6 | 20.5 / 22.5 |
| 8 | cuBLAS in bfloat16 | 15.3 | 12.5 | 53.5 | 29.8 |
| 32 | rounded, cuBLAS (a) / (b) | 18.6 / 16.3 | 15.1 / 15.9 | 43.3 / 37.7 | 35.4 / 38.6 |
| 32 | cuBLAS in bfloat16 | 16.4 | 13.0 | 50.1 | 28.9 |
| 128 | rounded, cuBLAS (a) / (b) | 15.8 / 16.9 | 15.5 / 16.5 | 38.3 / 36.3 | 36.0 / 39.7 |
| 128 | cuBLAS in bfloat16 | 17.0 | 13.3 | 54.1 | 33.1 |
| 8192 | product alone (a) / (b) | | 206 / 248 | 1263 / 1464 | |
| 8192 | cuBLAS in bfloat16 | 515 | 344 | 2031 | 1001 |

Rounding takes 1.6 µs up to 128 rows and 25 at 8192. The kernels for few rows miss the floor by the
start and end of programs that run for 4 to 8 steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.gemm.fp8_gemv import fp8_gemv
from asyncllm.kernels.triton.gemm.fp8_skinny import choose_tile, fp8_skinny
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.types import FP8_BLOCK, FP8_MAX, Fp8Matrix, Norm

#: Up to this many rows, the weight is converted to the dtype of x.
SKINNY = 16


def fp8_linear(p: Projection[Fp8Matrix]) -> Tensor:
    """``kernels.linear.linear`` with an 8-bit weight."""
    x, weight = p.x, p.weight
    rows = len(x)
    if rows == 1:
        return fp8_gemv(p)
    if rows <= SKINNY:
        return fp8_skinny(choose_tile(len(weight.data)), p.normalised())
    # cuBLAS wants scales of blocks for a multiple of 4 rows.
    multiple = 4 if weight.is_blocked else 1
    data, scale = quantize_rows(x, norm=p.norm, blocked=weight.is_blocked, multiple=multiple)
    y = scaled_mm(data, scale, weight, x.dtype)[:rows]
    if p.bias is not None:
        y += p.bias
    return p.finish(y)


@triton.jit
def _quantize(
    data,  # e4m3 [programs, K]
    scale,  # float32 [K / SIZE, programs]
    x,  # [M, K]
    gain,  # [K]
    M,
    x_stride,
    K: tl.constexpr,
    EPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each row, of [GROUPS, SIZE] elements; a scale for each group."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
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
    size = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12) / LIMIT
    values = tl.minimum(tl.maximum(values / size[:, None], -LIMIT), LIMIT)
    tl.store(data + row * K + k, values.to(data.dtype.element_ty), inside)
    tl.store(scale + group * tl.num_programs(0) + row, size, group * SIZE < K)


_launch = Launcher(_quantize)


def quantize_rows(
    x: Tensor, *, norm: Norm | None = None, blocked: bool = False, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Round x to e4m3, scaled so that the largest element becomes ``FP8_MAX``.

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
    gain, eps, offset = norm or (None, 0.0, None)
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    tile = (width // FP8_BLOCK, FP8_BLOCK) if blocked else (1, width)
    _launch(
        (rows, 1, 1),
        (data, scale, x, gain, len(x), x.stride(0)),
        (columns, eps, *tile, FP8_MAX, norm is not None, offset),
        min(max(width // 1024, 1), 8),
    )
    return data, scale.t()


def scaled_mm(data: Tensor, scale: Tensor, weight: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    """The product of two e4m3 matrices: [M, N] of ``dtype``."""
    y = torch._scaled_mm(
        data,
        weight.data.t(),
        scale_a=scale,
        scale_b=weight.scale.t(),
        out_dtype=torch.bfloat16,
    )
    return y.to(dtype)
