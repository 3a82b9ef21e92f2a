"""GPUs that can be planned for: their memory, and what they reach in practice."""

from __future__ import annotations

from typing import Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.executor.sim import cost
from asyncllm.kernels import gpu as kernels
from asyncllm.system.suggest import did_you_mean

#: The shares of a data sheet's bandwidth and of its dense 16-bit operations that the measured H200
#: reaches, in matmuls and in attention to prompts.
BANDWIDTH_SHARE: Final = cost.H200.bandwidth / 4.8e12
FLOPS_SHARE: Final = cost.H200.flops / 989e12
ATTENTION_SHARE: Final = cost.H200.attention_flops / 989e12
#: The gap after a kernel where kernels do not overlap (before Hopper): from single requests of
#: Qwen3-0.6B on an H200 that passed for an 8.0, 1,274 tokens/s instead of 1,813.
LATER_KERNEL_SECONDS: Final = 1.83e-6


class PlannedGpu(msgspec.Struct, frozen=True):
    """A kind of GPU, by its data sheet.

    Attributes:
        title: its name for people, and for CUDA.
        capability, multiprocessors: see ``asyncllm.kernels.gpu.Gpu``.
        memory: GiB, as CUDA reports them.
        bandwidth, flops: bytes a second, and dense 16-bit operations a second.
        link: bytes a second that one GPU sends to others.
        has_nvlink: else the link is PCIe.
    """

    title: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: float
    bandwidth: float
    flops: float
    link: float
    has_nvlink: bool = False

    @property
    def for_kernels(self) -> kernels.Gpu:
        return kernels.Gpu(self.capability, self.title, self.multiprocessors)

    @property
    def total_bytes(self) -> int:
        return int(self.memory * 2**30)

    @property
    def speed(self) -> cost.Gpu:
        """What it reaches, if it reaches the same shares of its data sheet as the H200."""
        hopper = self.for_kernels.has_pdl
        return cost.Gpu(
            memory=self.total_bytes,
            host_memory=cost.H200.host_memory,
            bandwidth=self.bandwidth * BANDWIDTH_SHARE,
            flops=self.flops * FLOPS_SHARE,
            attention_flops=self.flops * ATTENTION_SHARE,
            kernel_seconds=cost.H200.kernel_seconds if hopper else LATER_KERNEL_SECONDS,
            copy_bandwidth=cost.H200.copy_bandwidth if hopper else cost.H200.copy_bandwidth / 2,
        )


#: By name. PCIe counts as what its 16 lanes carry in practice.
GPUS: Final = {
    "h200": PlannedGpu("NVIDIA H200", (9, 0), 132, 139.81, 4.8e12, 989e12, 450e9, True),
    "h100": PlannedGpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 79.11, 3.35e12, 989e12, 450e9, True),
    "h100-pcie": PlannedGpu("NVIDIA H100 PCIe", (9, 0), 114, 79.11, 2.0e12, 756e12, 50e9),
    "h20": PlannedGpu("NVIDIA H20", (9, 0), 78, 95.0, 4.0e12, 148e12, 450e9, True),
    "b200": PlannedGpu("NVIDIA B200", (10, 0), 148, 178.35, 8.0e12, 2250e12, 900e9, True),
    "a100-80": PlannedGpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.14, 2.039e12, 312e12, 300e9, True
    ),
    "a100-40": PlannedGpu(
        "NVIDIA A100-SXM4-40GB", (8, 0), 108, 39.39, 1.555e12, 312e12, 300e9, True
    ),
    "a10": PlannedGpu("NVIDIA A10", (8, 6), 72, 21.98, 0.6e12, 125e12, 25e9),
    "l4": PlannedGpu("NVIDIA L4", (8, 9), 58, 22.03, 0.3e12, 121e12, 25e9),
    "l40s": PlannedGpu("NVIDIA L40S", (8, 9), 142, 44.39, 0.864e12, 362e12, 25e9),
    "rtx3090": PlannedGpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 23.57, 0.936e12, 71e12, 25e9),
    "rtx4090": PlannedGpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 23.52, 1.008e12, 165e12, 25e9),
    "rtx5090": PlannedGpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 31.36, 1.792e12, 209e12, 50e9),
}


def find_planned(name: str) -> PlannedGpu:
    """The GPU with a name such as "h200".

    Raises:
        BadRequest: there is none.
    """
    found = GPUS.get(name.lower().replace("_", "-"))
    if found is None:
        raise BadRequest(
            f"no GPU {name!r}{did_you_mean(name.lower(), list(GPUS))}; known are {', '.join(GPUS)}",
            param="gpu",
        )
    return found


def gpu_here() -> str:
    """The name of this machine's first GPU.

    Raises:
        BadRequest: there is none, or it is not one of ``GPUS``.
    """
    import torch

    if not torch.cuda.is_available():
        raise BadRequest(
            f"this machine has no GPU to plan for: name one, among {', '.join(GPUS)}", param="gpu"
        )
    title = torch.cuda.get_device_properties(0).name
    name = next((name for name, gpu in GPUS.items() if title.startswith(gpu.title)), None)
    if name is None:
        raise BadRequest(
            f"this machine's {title} is not known: name the GPU most like it, among "
            f"{', '.join(GPUS)}",
            param="gpu",
        )
    return name
