"""Projections whose weight is 8-bit floating point (e4m3), in Triton and by cuBLAS."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.activation import gated
from asyncllm.kernels.fp8 import BLOCK, LARGEST, Fp8Matrix
from asyncllm.kernels.norm import Norm, rms_norm
from asyncllm.kernels.triton import fp8_direct
from asyncllm.kernels.triton.fragments import takes_norm
from asyncllm.kernels.triton.launch import Launcher

#: Up to so many rows, x stays as it is and the weight is converted.
DIRECT = 16


def fp8_linear(
    x: Tensor,
    weight: Fp8Matrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """See ``kernels.fp8.fp8_linear``."""
    rows, columns = x.shape
    outputs = len(weight.data) if act is None else len(weight.data) // 2
    tile = fp8_direct.choose_tile(rows, outputs, columns) if rows <= DIRECT else None
    if tile is not None:
        if norm is not None and not takes_norm(x, norm):
            x, norm = rms_norm(x, norm), None
        return fp8_direct.fp8_direct(tile, x, weight, bias, norm=norm, residual=residual, act=act)
    # cuBLAS wants scales of blocks for a multiple of 4 rows.
    multiple = 4 if weight.is_blocked else 1
    data, scale = quantize_rows(x, norm=norm, blocked=weight.is_blocked, multiple=multiple)
    y = scaled_mm(data, scale, weight, x.dtype)[:rows]
    if bias is not None:
        y += bias
    if act is not None:
        return gated(y, act)
    return y if residual is None else residual.add_(y)


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
    """A row a program: [GROUPS, SIZE] elements, of which each group has a scale."""
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
        if OFFSET:
            values *= 1.0 + factor.to(tl.float32)
        else:
            values = values.to(x.dtype.element_ty).to(tl.float32) * factor.to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12) / LIMIT
    values = tl.minimum(tl.maximum(values / size[:, None], -LIMIT), LIMIT)
    tl.store(data + row * K + k, values.to(data.dtype.element_ty), inside)
    tl.store(scale + group * tl.num_programs(0) + row, size, group * SIZE < K)


_launch = Launcher(_quantize)


def quantize_rows(
    x: Tensor, *, norm: Norm | None = None, blocked: bool = False, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """See ``kernels.fp8.quantize_rows``."""
    columns = x.shape[1]
    rows = triton.cdiv(len(x), multiple) * multiple
    groups = columns // BLOCK if blocked else 1
    width = triton.next_power_of_2(columns)
    gain, eps, offset = norm or (None, 0.0, False)
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    _launch(
        (rows, 1, 1),
        (data, scale, x, gain, len(x), x.stride(0)),
        (
            *(
                columns,
                eps,
                width // BLOCK if blocked else 1,
                BLOCK if blocked else width,
            ),
            *(LARGEST, norm is not None, offset),
        ),
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
