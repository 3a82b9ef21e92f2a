"""Which tensors our Triton kernels handle."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

#: Hopper: our kernels overlap by programmatic dependent launch, which older GPUs lack.
MIN_CAPABILITY = (9, 0)


def has_triton_kernels(x: Tensor) -> bool:
    """Whether x is on a GPU that our kernels run on; otherwise plain torch handles it."""
    return x.is_cuda and _is_recent(x.device)


@cache
def _is_recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
