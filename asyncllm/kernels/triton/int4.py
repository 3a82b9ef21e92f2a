"""Projections whose weight is 4-bit integers, in Triton: which kernel takes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.activation import gated
from asyncllm.kernels.int4 import Int4Matrix
from asyncllm.kernels.norm import Norm, rms_norm
from asyncllm.kernels.triton import int4_direct, int4_skinny
from asyncllm.kernels.triton.fragments import takes_norm
from asyncllm.kernels.triton.int4_codes import offset_codes, subtract, unpack
from asyncllm.kernels.triton.launch import Launcher

#: Up to so many rows go straight to registers.
DIRECT = 16
#: Up to so many the weight is converted in registers; with more, in memory.
SKINNY = 64


def int4_linear(
    x: Tensor,
    weight: Int4Matrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """See ``kernels.int4.int4_linear``."""
    if norm is not None and (weight.order is not None or not takes_norm(x, norm)):
        x, norm = rms_norm(x, norm), None
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    rows, columns = x.shape
    outputs = len(weight.packed) if act is None else len(weight.packed) // 2
    direct = None
    if rows <= DIRECT:
        direct = int4_direct.choose_tile(rows, outputs, columns, weight.group)
    if direct is not None:
        return int4_direct.int4_direct(
            direct, x, weight, bias, norm=norm, residual=residual, act=act
        )
    if norm is not None:
        x = rms_norm(x, norm)
    if rows <= SKINNY:
        skinny = int4_skinny.choose_tile(rows, outputs)
        return int4_skinny.int4_skinny(skinny, x, weight, bias, residual=residual, act=act)
    y = F.linear(x, dequantize(weight, x.dtype), bias)
    if act is not None:
        return gated(y, act)
    return y if residual is None else residual.add_(y)


@triton.jit
def _dequantize(
    out,  # [N, K]
    packed,  # uint8 [N, K / 2]
    scale,  # [K / GROUP, N]
    zero,  # uint8 [K / GROUP, N]
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    HALF: tl.constexpr = BLOCK_K // 2
    DTYPE: tl.constexpr = out.dtype.element_ty
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, HALF)
    group = block * BLOCK_K // GROUP
    is_row = n < N
    mask = is_row[:, None]
    codes = tl.load(packed + n[:, None] * (K // 2) + block * HALF + half, mask)
    scales = tl.load(scale + group * N + n, is_row).to(tl.float32)[:, None]
    zeros = offset_codes(tl.load(zero + group * N + n, is_row), DTYPE)[:, None]
    low, high = unpack(codes, DTYPE, PDL)
    at = out + n[:, None] * K + block * BLOCK_K + half
    tl.store(at, (subtract(low, zeros, DTYPE, PDL).to(tl.float32) * scales).to(DTYPE), mask)
    tl.store(
        at + HALF,
        (subtract(high, zeros, DTYPE, PDL).to(tl.float32) * scales).to(DTYPE),
        mask,
    )


_launch = Launcher(_dequantize)


def dequantize(weight: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix itself, columns in the order stored: [N, K] of bfloat16 or float16."""
    size, half = weight.packed.shape
    out = torch.empty(size, 2 * half, dtype=dtype, device=weight.packed.device)
    block_n = 32
    _launch(
        (triton.cdiv(size, block_n), 2 * half // weight.block, 1),
        (out, weight.packed, weight.scale, weight.zero, size),
        (2 * half, weight.group, block_n, weight.block),
        4,
    )
    return out
