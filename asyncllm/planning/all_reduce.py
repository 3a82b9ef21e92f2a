"""What adding up a tensor over ranks takes."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from asyncllm.planning.gpus import PlannedGpu

#: Microseconds of a sum on two H200s, in a CUDA graph, by KiB: pushed up to 1 MiB, then by NCCL
#: (docs/why/tensor-parallelism.md). The last is NCCL's of another version.
KIB: Final = (8, 64, 256, 1024, 2048, 4096)
TWO_H200: Final = (1.8, 2.2, 3.3, 7.7, 28.6, 41.6)
#: The largest sum that is pushed.
PUSHED_KIB: Final = 1024
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
    if num_bytes <= PUSHED_KIB * 1024:
        # Each rank sends to each other.
        return _two_h200(kib if tp == 2 else (tp - 1) * kib, PUSHED_KIB)
    return _two_h200(kib) * (1 + NCCL_DOUBLING * (math.log2(tp) - 1))


def _two_h200(kib: float, last: int = KIB[-1]) -> float:
    """Between the points up to ``last``, and beyond it on the same line as before it."""
    count = KIB.index(last) + 1
    at, microseconds = KIB[:count], TWO_H200[:count]
    if kib <= last:
        return float(np.interp(kib, at, microseconds)) * 1e-6
    slope = (microseconds[-1] - microseconds[-2]) / (at[-1] - at[-2])
    return (microseconds[-1] + slope * (kib - last)) * 1e-6
