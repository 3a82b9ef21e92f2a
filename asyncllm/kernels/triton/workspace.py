"""Device memory that kernels keep from launch to launch."""

from __future__ import annotations

import torch
from torch import Tensor


def lasting_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that may be made while a CUDA graph is captured.

    They are made on the default stream, which is never captured, and on which steps run. Otherwise
    the capture would record the initialisation instead of running it.
    """
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        return torch.zeros(shape, dtype=dtype, device=device)
