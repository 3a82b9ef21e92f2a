"""Projections, together with the norm before and the activation or residual after them."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.reference.linear import linear_reference
from asyncllm.kernels.support import has_triton_kernels
from asyncllm.kernels.types import Norm, Weight


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """x @ weight.T + bias: [tokens, in_features] -> [tokens, out_features].

    On a GPU, few rows are multiplied by a quantised weight that is converted exactly. More rows
    are rounded to e4m3 for an fp8 weight (one scale for each row, or for each block of columns
    where the weight has blocks), and an int4 weight is converted to the dtype of x.

    Args:
        x: rows contiguous; bfloat16 or float16 for an int4 weight.
        weight: [out_features, in_features].
        norm: x is normalised first.
        residual: [tokens, out_features]; the product is added to it in place, and it is returned.
        act: a gated activation: the product is [gate, up], and act(gate) * up is returned:
            [tokens, out_features / 2]. Not together with ``residual``.
    """
    if has_triton_kernels(x):
        from asyncllm.kernels.triton.gemm.linear import linear as launch
    else:
        launch = linear_reference
    return launch(x, weight, bias, norm=norm, residual=residual, act=act)
