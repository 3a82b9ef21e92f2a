from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.reference.activation import gated_reference
from asyncllm.kernels.reference.norm import rms_norm_reference
from asyncllm.kernels.reference.quantized import dequantize_fp8, dequantize_int4
from asyncllm.kernels.types import Fp8Matrix, Int4Matrix, Norm, Weight


def linear_reference(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """See ``kernels.linear.linear``; a quantised weight is converted to the dtype of x."""
    if norm is not None:
        x = rms_norm_reference(x, norm)
    if residual is not None and bias is None and isinstance(weight, Tensor):
        return residual.addmm_(x, weight.t())
    if isinstance(weight, Int4Matrix):
        x = x if weight.order is None else x[:, weight.order]
        weight = dequantize_int4(weight).to(x.dtype)
    elif isinstance(weight, Fp8Matrix):
        weight = dequantize_fp8(weight).to(x.dtype)
    y = F.linear(x, weight, bias)
    if act is not None:
        return gated_reference(y, act)
    return y if residual is None else residual.add_(y)
