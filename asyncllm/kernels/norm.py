"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.native import has_triton_kernels


class Norm(NamedTuple):
    """x / rms(x) * weight, over the last dimension.

    Attributes:
        weight: [size].
        eps: added to the mean of squares.
        offset: Gemma's: the factor is 1 + weight, and all of it is float32. Otherwise x is
            normalised in float32 and rounded before it meets the weight.
    """

    weight: Tensor
    eps: float
    offset: bool = False


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalise [..., size], whose last dimension is contiguous; the same shape and dtype."""
    if has_triton_kernels(x):
        from asyncllm.kernels.triton.norm import rms_norm as launch

        return launch(x, norm)
    return rms_norm_reference(x, norm)


def rms_norm_reference(x: Tensor, norm: Norm) -> Tensor:
    """``rms_norm`` in plain torch."""
    weight, eps, offset = norm
    if offset:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight.float(), eps).type_as(x)
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps)


__all__ = ["Norm", "rms_norm", "rms_norm_reference"]
