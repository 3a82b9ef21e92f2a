"""Projections whose weight is 8-bit floating point (e4m3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.activation import gated
from asyncllm.kernels.native import has_triton_kernels
from asyncllm.kernels.norm import Norm, rms_norm

#: Rows and columns of the weight, or columns of the activations, that share a scale.
BLOCK = 128
#: The largest e4m3 number.
LARGEST = 448.0


class Fp8Matrix(NamedTuple):
    """A matrix whose elements are ``data * scale``.

    Attributes:
        data: float8_e4m3fn [N, K].
        scale: float32, of each row [N, 1], or of each block [ceil(N / BLOCK), ceil(K / BLOCK)].
    """

    data: Tensor
    scale: Tensor

    @property
    def is_blocked(self) -> bool:
        """Whether the scales are those of blocks."""
        return self.scale.shape != (self.data.shape[0], 1)

    def rows(self, start: int, end: int) -> Fp8Matrix:
        """Some of the rows, from a multiple of BLOCK; a view."""
        if self.is_blocked:
            return Fp8Matrix(self.data[start:end], self.scale[start // BLOCK : -(-end // BLOCK)])
        return Fp8Matrix(self.data[start:end], self.scale[start:end])


def fp8_linear(
    x: Tensor,
    weight: Fp8Matrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``kernels.linear.linear`` with an 8-bit weight.

    On a GPU, the product of few rows is that of x and the weight converted to the dtype of x. With
    more, x is rounded to e4m3, too: with a scale for each row, or for each block of its columns
    where the weight has blocks.
    """
    if has_triton_kernels(x):
        from asyncllm.kernels.triton.gemm.fp8 import fp8_linear as launch

        return launch(x, weight, bias, norm=norm, residual=residual, act=act)
    return fp8_linear_reference(x, weight, bias, norm=norm, residual=residual, act=act)


def fp8_linear_reference(
    x: Tensor,
    weight: Fp8Matrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``fp8_linear`` in plain torch, with the weight converted to the dtype of x."""
    if norm is not None:
        x = rms_norm(x, norm)
    y = F.linear(x, dequantize_fp8(weight).to(x.dtype), bias)
    if act is not None:
        return gated(y, act)
    return y if residual is None else residual.add_(y)


def dequantize_fp8(weight: Fp8Matrix) -> Tensor:
    """The matrix itself: float32 [N, K]."""
    data, scale = weight
    if weight.is_blocked:
        rows, columns = data.shape
        scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return data.float() * scale


def quantize_rows(
    x: Tensor, *, norm: Norm | None = None, blocked: bool = False, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Round x to e4m3, scaled so that the largest element becomes ``LARGEST``.

    Args:
        x: [M, K]; rows contiguous. K is a multiple of BLOCK if ``blocked``.
        norm: x is normalised first.
        blocked: each BLOCK columns of a row have a scale, rather than the row.
        multiple: rows of zeros are added until there are a multiple of so many.

    Returns:
        float8_e4m3fn [M, K], and the float32 scales: [M, 1] or [M, K / BLOCK], of which those of
        one block of columns are contiguous.
    """
    if has_triton_kernels(x):
        from asyncllm.kernels.triton.gemm.fp8 import quantize_rows as launch

        return launch(x, norm=norm, blocked=blocked, multiple=multiple)
    return quantize_rows_reference(x, norm=norm, blocked=blocked, multiple=multiple)


def quantize_rows_reference(
    x: Tensor, *, norm: Norm | None = None, blocked: bool = False, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """``quantize_rows`` in plain torch."""
    if norm is not None:
        x = rms_norm(x, norm)
    x = F.pad(x, (0, 0, 0, -len(x) % multiple))
    pieces = x.float().unflatten(1, (-1, BLOCK if blocked else x.shape[1]))
    scale = pieces.abs().amax(2, keepdim=True).clamp(min=1e-12) / LARGEST
    data = (pieces / scale).clamp(-LARGEST, LARGEST).flatten(1).to(torch.float8_e4m3fn)
    return data, scale.squeeze(2).t().contiguous().t()


__all__ = [
    "BLOCK",
    "LARGEST",
    "Fp8Matrix",
    "dequantize_fp8",
    "fp8_linear",
    "fp8_linear_reference",
    "quantize_rows",
    "quantize_rows_reference",
]
