"""From host arrays to device tensors, without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device, ordered before kernels launched later; on the CPU there is no copy."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        # The caching host allocator keeps the pinned block until the copy has run.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
