"""Conversions of quantised matrices, in plain torch."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.types import (
    FP8_BLOCK,
    MXFP4_BLOCK,
    MXFP4_COLUMNS,
    Fp8Matrix,
    Int4Matrix,
    Mxfp4Matrix,
    packed_block,
)

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The number of each code of e2m1.
_E2M1 = (*_MAGNITUDES, *(-number for number in _MAGNITUDES))


def dequantize_fp8(weight: Fp8Matrix) -> Tensor:
    """The matrix as float32 [N, K]."""
    data, scale = weight
    if weight.is_blocked:
        rows, columns = data.shape
        scale = scale.repeat_interleave(FP8_BLOCK, 0)[:rows]
        scale = scale.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return data.float() * scale


def dequantize_int4(weight: Int4Matrix) -> Tensor:
    """The matrix as float32 [N, K], columns in the order stored."""
    bytes_ = weight.packed.unflatten(1, (-1, weight.block // 2))
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), dim=2).flatten(1)
    zero, scale = (
        part.float().t().repeat_interleave(weight.group, 1) for part in (weight.zero, weight.scale)
    )
    values: Tensor = (codes.float() - zero) * scale
    return values


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Matrices of experts in bfloat16, [experts, N, K], which has all their numbers.

    OCP Microscaling Formats (MX), version 1.0, 2023: e2m1 codes and e8m0 scales.

    Args:
        blocks: uint8 [experts, N, K / 32, 16], two codes each, the first in the lower bits; or
            [experts, N, K / 2].
        scales: uint8 [experts, N, K / 32]: exponents of 2, plus 127.
    """
    numbers = torch.tensor(_E2M1, dtype=torch.bfloat16, device=blocks.device)
    experts, rows, groups = scales.shape
    out = numbers.new_empty(experts, rows, groups * MXFP4_BLOCK)
    for expert, codes, exponents in zip(out, blocks, scales, strict=True):
        pairs = torch.stack((codes & 15, codes >> 4), dim=-1).view(rows, groups, -1)
        # The bits of a float32; 0, which stands for less than any weight, becomes 0.
        factors = (exponents.int() << 23).view(torch.float32).to(numbers.dtype)
        expert.copy_((numbers[pairs.int()] * factors.unsqueeze(-1)).flatten(1))
    return out


#: Of each group of 64 columns and pair of columns of four: where a half word has the signs and the
#: other bits of its codes.
_MXFP4_PLACES: Final = {(0, 0): (15, 9), (0, 1): (12, 6), (1, 0): (14, 3), (1, 1): (13, 0)}


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> Mxfp4Matrix:
    """The matrix for kernels of what ``dequantize_mxfp4`` takes: [experts * N, K]."""
    experts, rows, groups = scales.shape
    padding = -groups % (MXFP4_COLUMNS // MXFP4_BLOCK)
    codes = F.pad(blocks.reshape(experts * rows, groups, -1), (0, 0, 0, padding))
    even, odd = (codes & 15).int(), (codes >> 4).int()
    pairs = torch.stack((even, odd), dim=3).view(experts * rows, -1, 2, MXFP4_BLOCK // 4, 2, 2)
    words = pairs.new_zeros(*pairs.shape[:2], MXFP4_BLOCK // 4, 2)
    for (group, pair), (sign, rest) in _MXFP4_PLACES.items():
        code = pairs[:, :, group, :, pair]
        words |= (code >> 3) << sign | (code & 7) << rest
    packed = torch.stack((words & 255, words >> 8), dim=-1).to(torch.uint8).flatten(1)
    return Mxfp4Matrix(packed, F.pad(scales.view(experts * rows, groups), (0, padding)))


def unpack_mxfp4(matrix: Mxfp4Matrix) -> Tensor:
    """The matrix as float32 [N, padded K]."""
    packed = matrix.packed.view(len(matrix.packed), -1, MXFP4_BLOCK // 4, 2, 2).int()
    words = packed[..., 0] | packed[..., 1] << 8
    codes = words.new_empty(*words.shape[:2], 2, MXFP4_BLOCK // 4, 2, 2)
    for (group, pair), (sign, rest) in _MXFP4_PLACES.items():
        codes[:, :, group, :, pair] = (words >> sign & 1) << 3 | words >> rest & 7
    numbers = torch.tensor(_E2M1, device=words.device)
    values = numbers[codes].view(len(words), -1, MXFP4_BLOCK)
    factors = torch.exp2(matrix.scale.float() - 127)
    return (values * factors.unsqueeze(-1)).flatten(1)


def pack_int4(codes: Tensor, group: int) -> Tensor:
    """``Int4Matrix.packed`` of codes, uint8 [N, K] below 16."""
    low, high = codes.unflatten(1, (-1, 2, packed_block(group) // 2)).unbind(2)
    packed: Tensor = (low | (high << 4)).flatten(1)
    return packed
