from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.types import Norm


def rms_norm_reference(x: Tensor, norm: Norm) -> Tensor:
    """See ``kernels.norm.rms_norm``."""
    weight, eps, offset = norm
    if offset:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight.float(), eps).type_as(x)
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps)
