"""Projections whose weight is 4-bit integers with a scale and a zero point for each group."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.activation import gated
from asyncllm.kernels.native import has_triton_kernels
from asyncllm.kernels.norm import Norm, rms_norm

#: Columns that are packed together, at most; fewer where they would be of several groups.
PACKED = 128


class Int4Matrix(NamedTuple):
    """A matrix [N, K] whose elements are ``(code - zero) * scale``.

    Each ``block`` columns of a row are half as many bytes: the low nibbles are the codes of the
    first half of the columns, the high nibbles those of the second half.

    Attributes:
        packed: uint8 [N, K / 2].
        scale: float16 or float32 [K / group, N]: groups are consecutive columns.
        zero: uint8 [K / group, N], at most 16.
        order: int64 [K], or None: column j of the matrix meets element ``order[j]`` of the input.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None = None

    @property
    def group(self) -> int:
        """Columns that share a scale and a zero point."""
        return 2 * self.packed.shape[1] // self.scale.shape[0]

    @property
    def block(self) -> int:
        """Columns that are packed together."""
        return packed_block(self.group)

    def rows(self, start: int, end: int) -> Int4Matrix:
        """Some of the rows; a view."""
        return Int4Matrix(
            self.packed[start:end], self.scale[:, start:end], self.zero[:, start:end], self.order
        )


def int4_linear(
    x: Tensor,
    weight: Int4Matrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``kernels.linear.linear`` with a 4-bit weight, for x of bfloat16 or float16.

    On a GPU codes less zero points are multiplied exactly and scaled in float32 when x has few
    rows. With more, the weight is converted to the dtype of x first.
    """
    if has_triton_kernels(x):
        from asyncllm.kernels.triton.gemm.int4 import int4_linear as launch

        return launch(x, weight, bias, norm=norm, residual=residual, act=act)
    return int4_linear_reference(x, weight, bias, norm=norm, residual=residual, act=act)


def int4_linear_reference(
    x: Tensor,
    weight: Int4Matrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``int4_linear`` in plain torch, with the weight converted to the dtype of x."""
    if norm is not None:
        x = rms_norm(x, norm)
    if weight.order is not None:
        x = x[:, weight.order]
    y = F.linear(x, dequantize_int4(weight).to(x.dtype), bias)
    if act is not None:
        return gated(y, act)
    return y if residual is None else residual.add_(y)


def packed_block(group: int) -> int:
    """``Int4Matrix.block`` for groups of so many columns."""
    return gcd(group, PACKED)


def pack_int4(codes: Tensor, group: int) -> Tensor:
    """Codes, uint8 [N, K] below 16, as ``Int4Matrix.packed`` has them."""
    low, high = codes.unflatten(1, (-1, 2, packed_block(group) // 2)).unbind(2)
    packed: Tensor = (low | (high << 4)).flatten(1)
    return packed


def dequantize_int4(weight: Int4Matrix) -> Tensor:
    """The matrix itself, columns in the order stored: float32 [N, K]."""
    bytes_ = weight.packed.unflatten(1, (-1, weight.block // 2))
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), dim=2).flatten(1)
    zero, scale = (
        part.float().t().repeat_interleave(weight.group, 1) for part in (weight.zero, weight.scale)
    )
    values: Tensor = (codes.float() - zero) * scale
    return values


__all__ = [
    "PACKED",
    "Int4Matrix",
    "dequantize_int4",
    "int4_linear",
    "int4_linear_reference",
    "pack_int4",
    "packed_block",
]
