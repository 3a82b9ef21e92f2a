"""What adding up a tensor over ranks takes."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from asyncllm.planning.gpus import PlannedGpu

#: Microseconds of a sum on two H200s, in a CUDA graph, by KiB (docs/why/tensor-parallelism.md).
PUSHED_KIB: Final = (8, 64, 256, 1024, 4096, 12288)
PUSHED: Final = (1.7, 2.0, 2.8, 5.7, 17.0, 47.4)
NCCL_KIB: Final = (8192, 12288)
NCCL: Final = (50.8, 67.2)
#: What each doubling of the ranks adds to a sum by NCCL, as a share: measured from 2 to 4 H200s.
NCCL_DOUBLING: Final = 0.23
#: Bytes a second that one H200 sends.
H200_LINK: Final = 450e9
#: Seconds of a small sum over PCIe, on 2 GPUs; each doubling adds half as much.
PCIE_SECONDS: Final = 30e-6


def is_measured(gpu: PlannedGpu, tp: int) -> bool:
    """Whether the times are of this very kind and number of GPUs."""
    return gpu.title == "NVIDIA H200" and tp == 2


def all_reduce_seconds(gpu: PlannedGpu, tp: int, num_bytes: float) -> float:
    """The seconds of one sum over ``tp`` GPUs of one machine; 0.0 for one."""
    if tp == 1:
        return 0.0
    if not gpu.has_nvlink:
        # A ring: each GPU sends its part to the next, twice around.
        sent = 2 * (tp - 1) / tp * num_bytes
        return PCIE_SECONDS * (1 + math.log2(tp)) / 2 + sent / gpu.link
    # What depends on the size grows as the link is slower.
    kib = num_bytes / 1024 * H200_LINK / gpu.link
    if num_bytes * (tp - 1) <= PUSHED_KIB[-1] * 1024:
        return _between((tp - 1) * kib, PUSHED_KIB, PUSHED)  # each rank sends to each other
    return _between(kib, NCCL_KIB, NCCL) * (1 + NCCL_DOUBLING * (math.log2(tp) - 1))


def _between(kib: float, at: tuple[int, ...], microseconds: tuple[float, ...]) -> float:
    """Seconds: between the points, and beyond the last on the same line as before it."""
    if kib <= at[-1]:
        return float(np.interp(kib, at, microseconds)) * 1e-6
    slope = (microseconds[-1] - microseconds[-2]) / (at[-1] - at[-2])
    return (microseconds[-1] + slope * (kib - at[-1])) * 1e-6
