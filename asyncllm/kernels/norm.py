"""Root-mean-square normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.support import in_triton
from asyncllm.kernels.types import Norm


@in_triton("norm")
def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalise [..., size], whose last dimension is contiguous; the same shape and dtype.

    With a weight [groups, size], x is [..., groups, size], and there is no offset.
    """
    weight, eps, offset = norm
    if offset is None:
        return weight * F.rms_norm(x, x.shape[-1:], eps=eps)
    return F.rms_norm(x.float(), x.shape[-1:], weight.float() + offset, eps).type_as(x)
