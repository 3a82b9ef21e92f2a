"""Projections, together with what comes right before and after them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.activation import gated
from asyncllm.kernels.native import has_triton_kernels
from asyncllm.kernels.norm import Norm, rms_norm


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """x @ weight.T + bias: [tokens, in_features] -> [tokens, out_features].

    Args:
        x: rows contiguous.
        weight: [out_features, in_features].
        norm: x is normalised first.
        residual: [tokens, out_features]; the product is added to it in place, and it is returned.
        act: the product is the gate and then the other half of a gated activation of this name,
            which is returned: [tokens, out_features / 2]. Not together with ``residual``.
    """
    if has_triton_kernels(x):
        from asyncllm.kernels.triton.gemm.linear import linear as launch

        return launch(x, weight, bias, norm=norm, residual=residual, act=act)
    return linear_reference(x, weight, bias, norm=norm, residual=residual, act=act)


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``linear`` as one library call for the product and one each for the rest."""
    if norm is not None:
        x = rms_norm(x, norm)
    if residual is not None and bias is None:
        return residual.addmm_(x, weight.t())
    y = F.linear(x, weight, bias)
    if act is not None:
        return gated(y, act)
    return y if residual is None else residual.add_(y)


__all__ = ["linear", "linear_reference"]
