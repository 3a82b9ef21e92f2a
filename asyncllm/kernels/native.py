"""Where kernels of our own run."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

#: Hopper: kernels overlap with those around them in a way that older GPUs do not have.
MIN_CAPABILITY = (9, 0)


def has_triton_kernels(x: Tensor) -> bool:
    """Whether what is done with x is done by kernels of our own, or else by plain torch."""
    return x.is_cuda and _is_recent(x.device)


@cache
def _is_recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


__all__ = ["MIN_CAPABILITY", "has_triton_kernels"]
