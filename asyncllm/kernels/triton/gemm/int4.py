"""Projections with a 4-bit integer weight.

Measured on an H200, Qwen3-8B's projections in groups of 128, µs, in CUDA graphs over weights that
do not fit into the L2 cache; the floor is reading the codes at 4.3 TB/s.

| rows | kernel | qkv 6144 x 4096 | o 4096 x 4096 | gate_up 24576 x 4096 | down 4096 x 12288 |
|--|--|--|--|--|--|
| | floor of int4 (of bfloat16) | 2.9 (11.7) | 2.0 (7.8) | 11.7 (46.8) | 5.9 (23.4) |
| 1 | ``int4_skinny`` | 10.3 | 8.0 | 24.4 | 16.2 |
| 1 | cuBLAS in bfloat16 | 16.1 | 12.6 | 48.5 | 29.0 |
| 8 | ``int4_skinny`` | 11.0 | 8.5 | 25.1 | 17.1 |
| 16 | ``int4_skinny`` | 13.7 | 10.8 | 35.6 | 23.1 |
| 32 | ``int4_skinny`` | 14.9 | 14.3 | 40.3 | 34.1 |
| 32 | cuBLAS in bfloat16 | 16.4 | 13.0 | 50.1 | 28.9 |
| 64 | ``int4_skinny`` | 30.2 | 23.7 | 73.9 | 59.2 |
| 128 | dequantised, cuBLAS | 35.4 | 23.8 | 137 | 72.6 |
| 128 | cuBLAS in bfloat16 | 17.0 | 13.3 | 54.1 | 33.1 |

Few rows are bound by instructions, about 3 for each weight, not by reading; more rows are bound by
reading x, all of it in every program.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.codes import offset_codes, subtract, unpack
from asyncllm.kernels.triton.gemm.int4_skinny import choose_tile, int4_skinny
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import Launcher, cdiv, shared_bytes
from asyncllm.kernels.types import Int4Matrix

#: Up to this many rows the weight is converted in registers; with more, in memory.
SKINNY = 64


def int4_linear(p: Projection[Int4Matrix]) -> Tensor:
    """``kernels.linear.linear`` with a 4-bit weight."""
    p = p.normalised()
    weight = p.weight
    if weight.order is not None:
        p = p._replace(x=p.x.index_select(1, weight.order))
    if len(p.x) <= SKINNY:
        return int4_skinny(choose_tile(len(p.x), len(weight.packed), shared_bytes(p.x)), p)
    return p.finish(F.linear(p.x, dequantize(weight, p.x.dtype), p.bias))


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
    low, high = unpack(codes, DTYPE)
    at = out + n[:, None] * K + block * BLOCK_K + half
    tl.store(at, (subtract(low, zeros, DTYPE).to(tl.float32) * scales).to(DTYPE), mask)
    tl.store(
        at + HALF,
        (subtract(high, zeros, DTYPE).to(tl.float32) * scales).to(DTYPE),
        mask,
    )


_launch = Launcher(_dequantize)


def dequantize(weight: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix as bfloat16 or float16 [N, K], columns in the order stored."""
    size, half = weight.packed.shape
    out = torch.empty(size, 2 * half, dtype=dtype, device=weight.packed.device)
    block_n = 32
    _launch(
        (cdiv(size, block_n), 2 * half // weight.block, 1),
        (out, weight.packed, weight.scale, weight.zero, size),
        (2 * half, weight.group, block_n, weight.block),
        4,
    )
    return out
