"""Projections, together with the norm before and the activation or residual after them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.activation import gated
from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.quantized import Fp8Rows, dequantize_fp8, dequantize_int4
from asyncllm.kernels.support import in_triton
from asyncllm.kernels.types import Fp8Matrix, Int4Matrix, Norm, Weight


@in_triton("gemm.linear")
def linear(
    x: Tensor | Fp8Rows,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias: [tokens, in_features] -> [tokens, out_features].

    On a GPU, a row or few are multiplied by a quantised weight that is converted exactly. More rows
    are rounded to e4m3 for an fp8 weight (one scale for each row, or for each block of columns
    where the weight has blocks), and an int4 weight is converted to the dtype of x. In plain torch,
    any quantised weight is converted to the dtype of x.

    Args:
        x: rows contiguous; bfloat16 or float16 for an int4 weight. Or what ``gated_linear`` gives.
        weight: [out_features, in_features].
        norm: x is normalised first.
        residual: [tokens, out_features]; the product is added to it in place, and it is returned.
        act: a gated activation: the product is [gate, up], and act(gate) * up is returned:
            [tokens, out_features / 2]. Not together with ``residual``.
        dtype: of the output, by default that of x. Another one only for a weight in the dtype of
            x, and without bias, residual and activation.
    """
    assert isinstance(x, Tensor), "only kernels round rows"
    if norm is not None:
        x = rms_norm.reference(x, norm)
    if dtype is not None and isinstance(weight, Tensor):
        return F.linear(x.to(dtype), weight.to(dtype))
    if residual is not None and bias is None and isinstance(weight, Tensor):
        return residual.addmm_(x, weight.t())
    if isinstance(weight, Int4Matrix):
        x = x if weight.order is None else x[:, weight.order]
        weight = dequantize_int4(weight).to(x.dtype)
    elif isinstance(weight, Fp8Matrix):
        weight = dequantize_fp8(weight).to(x.dtype)
    y = F.linear(x, weight, bias)
    if act is not None:
        return gated.reference(y, act)
    return y if residual is None else residual.add_(y)


@in_triton("gemm.linear")
def linear_with_rest(
    x: Tensor, weight: Weight, rest: Tensor, *, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """Two projections of the same x: ``linear`` of a weight in any format and of one in x's dtype.

    On a GPU, one row is multiplied by both in one launch if the first is an fp8 weight.
    """
    return linear.reference(x, weight, norm=norm), linear.reference(x, rest, norm=norm)


@in_triton("gemm.linear")
def gated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    act: str,
    then: Weight,
    *,
    norm: Norm | None = None,
) -> Tensor | Fp8Rows:
    """``linear`` with a gated activation, whose result only ``linear`` takes.

    Args:
        then: the weight of that projection. If it is in fp8, the result may be rounded for it, in
            the kernel that applies the activation.
    """
    return linear.reference(x, weight, bias, norm=norm, act=act)


@in_triton("gemm.ordered")
def ordered_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``linear``, of which each row has the same bits in any batch; in plain torch it may not.

    An fp8 weight always multiplies rows that are rounded to e4m3.
    """
    return linear.reference(x, weight, bias, norm=norm, residual=residual, act=act, dtype=dtype)


def ordered_linear_with_rest(
    x: Tensor, weight: Weight, rest: Tensor, *, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """``linear_with_rest`` by ``ordered_linear``."""
    return ordered_linear(x, weight, norm=norm), ordered_linear(x, rest, norm=norm)


def ordered_gated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    act: str,
    then: Weight,
    *,
    norm: Norm | None = None,
) -> Tensor:
    """``gated_linear`` by ``ordered_linear``, which rounds nothing for the next projection."""
    return ordered_linear(x, weight, bias, norm=norm, act=act)
