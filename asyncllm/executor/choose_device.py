"""The device, the dtype and the kernels of a configuration."""

from __future__ import annotations

import logging

import torch

from asyncllm.attention.choose import BackendName
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.executor.device import CpuDevice, CudaDevice, Device
from asyncllm.kernels.choice import FASTEST, ORDERED, Kernels
from asyncllm.kernels.gpu import Gpu, gpu_of
from asyncllm.kernels.support import obstacle
from asyncllm.models.spec import ModelSpec

log = logging.getLogger(__name__)


def open_device(config: EngineConfig, rank: int = 0, size: int | None = None) -> Device:
    """The device of a rank; "auto" falls back to the CPU. Ranks have consecutive GPUs.

    Args:
        rank: among those of this machine.
        size: how many ranks this machine has; ``config.tp`` by default.

    Raises:
        ModelError: there are not as many GPUs.
    """
    size = size or config.tp
    if config.gpu is None:
        return CpuDevice(_cpu_threads(config, size))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.gpu + size <= count:
        return CudaDevice(config.gpu + rank)
    if config.device != "auto":
        last = f", up to cuda:{count - 1}" if count else ""
        here = "" if size == config.tp else f", {size} on each machine"
        ranks = f" with tp {config.tp}{here}" if config.tp > 1 else ""
        raise ModelError(
            f"device {config.device}{ranks}: PyTorch sees {count} CUDA devices{last}",
            param="device" if config.gpu >= count else "tp",
        )
    if count:
        raise ModelError(f"tp {config.tp}: PyTorch sees {count} CUDA devices", param="tp")
    log.warning("no CUDA device: running on the CPU")
    return CpuDevice(_cpu_threads(config, size))


def _cpu_threads(config: EngineConfig, size: int) -> int | None:
    """Threads of one rank; None for PyTorch's choice."""
    if config.cpu_threads is not None or size == 1:
        return config.cpu_threads
    return max(torch.get_num_threads() // size, 1)


def cache_dtype(config: EngineConfig, dtype: torch.dtype, gpu: Gpu | None) -> torch.dtype:
    """The dtype of the KV cache of a model that computes in ``dtype``.

    Args:
        gpu: None on a CPU.

    Raises:
        ModelError: the GPU has no 8-bit floating-point numbers.
    """
    if not config.has_fp8_cache:
        return dtype
    if gpu is not None and not gpu.has_fp8:
        raise ModelError(
            f"kv_cache_dtype {config.kv_cache_dtype} needs a GPU of compute capability 8.9 or "
            f"newer, and this is a {gpu}",
            param="kv_cache_dtype",
        )
    return torch.float8_e4m3fn


def compute_dtype(config: EngineConfig, device: Device) -> torch.dtype:
    """The dtype of the computation: by default float32 on a CPU, bfloat16 on a GPU that has it."""
    on_cpu = device.torch_device.type == "cpu"
    if config.dtype == "auto":
        if on_cpu:
            return torch.float32
        gpu = gpu_of(device.torch_device)
        if gpu.has_bfloat16:
            return torch.bfloat16
        log.warning("%s has no bfloat16: computing in float16 (--dtype float32 is safer)", gpu)
        return torch.float16
    if config.dtype == "float16" and on_cpu:
        log.warning("float16 has no fast CPU kernels: computing in bfloat16")
        return torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def check_deterministic(spec: ModelSpec, device: torch.device) -> None:
    """Check that this model can be deterministic here, before its weights are loaded.

    Raises:
        ModelError: it cannot; the message says why.
    """
    reason = None
    if device.type != "cuda":
        reason = "needs a GPU"
    elif (problem := obstacle(device)) is not None:
        reason = f"needs our own kernels, which do not run here: {problem}"
    elif spec.weight_format == "fp8" and not gpu_of(device).is_hopper:
        reason = "needs a Hopper GPU for weights in fp8"
    if reason is not None:
        raise ModelError(f"deterministic {reason}", param="deterministic")


def chosen_kernels(config: EngineConfig) -> Kernels:
    """The kernels of layers."""
    return ORDERED if config.deterministic else FASTEST


def chosen_attention(config: EngineConfig) -> BackendName:
    """The attention backend."""
    return "ordered" if config.deterministic else config.attention
