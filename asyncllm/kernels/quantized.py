"""Conversions of quantised matrices, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.types import FP8_BLOCK, Fp8Matrix, Int4Matrix, packed_block


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


def pack_int4(codes: Tensor, group: int) -> Tensor:
    """``Int4Matrix.packed`` of codes, uint8 [N, K] below 16."""
    low, high = codes.unflatten(1, (-1, 2, packed_block(group) // 2)).unbind(2)
    packed: Tensor = (low | (high << 4)).flatten(1)
    return packed
