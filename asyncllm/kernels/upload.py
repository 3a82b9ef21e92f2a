"""From host arrays to device tensors, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

#: Copies an array to a device, ordered before kernels launched later.
Upload = Callable[[np.ndarray], Tensor]


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device, ordered before kernels launched later; on the CPU there is no copy."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        # The caching host allocator keeps the pinned block until the copy has run.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def upload_aligned(
    arrays: Sequence[np.ndarray], dtype: type[np.integer], upload: Upload
) -> list[Tensor]:
    """Copy arrays of integers at once; see ``pack_aligned``."""
    packed, places = pack_aligned(arrays, dtype)
    on_device = upload(packed)
    return [on_device[place] for place in places]


def pack_aligned(
    arrays: Sequence[np.ndarray], dtype: type[np.integer]
) -> tuple[np.ndarray, list[slice]]:
    """Arrays of integers in one, and their places there; each begins at a multiple of 16 bytes.

    Kernels have separate variants for unaligned arguments, which are therefore never needed.
    """
    per_line = 16 // np.dtype(dtype).itemsize
    starts = np.cumsum([0, *(-(-len(array) // per_line) * per_line for array in arrays)])
    packed = np.zeros(starts[-1], dtype=dtype)
    places = [
        slice(start, start + len(array)) for start, array in zip(starts[:-1], arrays, strict=True)
    ]
    for place, array in zip(places, arrays, strict=True):
        packed[place] = array
    return packed, places
