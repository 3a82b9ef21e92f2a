"""What adding up a tensor over ranks takes."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from asyncllm.lab.planning.gpus import PlannedGpu

#: Microseconds of a sum on two H200s, in a CUDA graph, by the KiB that each rank pushes
#: (docs/why/tensor-parallelism.md).
PUSHED_KIB: Final = (8, 64, 256, 1024, 4096, 12288)
PUSHED: Final = (1.7, 2.0, 2.8, 5.7, 17.0, 47.4)
#: Sums in two shots cross the link once more, and are taken where they push so many KiB less
#: (``asyncllm.parallel.push``).
CROSSING_SECONDS: Final = 1.4e-6
CROSSING_KIB: Final = 384
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
    kib = num_bytes / 1024
    one_shot, two_shots = (tp - 1) * kib, 2 * (tp - 1) / tp * kib
    crossing = CROSSING_SECONDS if one_shot - two_shots > CROSSING_KIB else 0.0
    pushed = two_shots if crossing else one_shot
    slower = H200_LINK / gpu.link  # what depends on the size
    if pushed <= PUSHED_KIB[-1]:
        return crossing + _between(pushed * slower, PUSHED_KIB, PUSHED)
    return _between(kib * slower, NCCL_KIB, NCCL) * (1 + NCCL_DOUBLING * (math.log2(tp) - 1))


def _between(kib: float, at: tuple[int, ...], microseconds: tuple[float, ...]) -> float:
    """Seconds: between the points, and beyond the last on the same line as before it."""
    if kib <= at[-1]:
        return float(np.interp(kib, at, microseconds)) * 1e-6
    slope = (microseconds[-1] - microseconds[-2]) / (at[-1] - at[-2])
    return (microseconds[-1] + slope * (kib - at[-1])) * 1e-6
