"""Assemble a worker: device, weights, KV cache, kernels. Runs in the executor thread."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# CPU kernels of a process that is not alone on its cores must not spin at barriers: with one busy
# neighbour that costs a factor of 10 to 100. OpenMP reads this once, when torch is first imported.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from asyncllm.attention.base import AttentionBackend
from asyncllm.attention.choose import choose_backend
from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import ModelError
from asyncllm.executor.copies import PageCopier
from asyncllm.executor.device import CpuDevice, CudaDevice, Device, available_host_bytes
from asyncllm.executor.eager import EagerForward, StepForward
from asyncllm.executor.graphs import GraphedForward
from asyncllm.executor.host_pool import HostPool
from asyncllm.executor.kv_pool import KVPool
from asyncllm.executor.memory import resolve_limits
from asyncllm.executor.programs import GraphBackend, StepPrograms
from asyncllm.executor.runner import ModelRunner
from asyncllm.executor.sampler import Sampler
from asyncllm.executor.slots import SlotTable
from asyncllm.executor.worker import Worker
from asyncllm.models.base import CausalLM
from asyncllm.models.loader import load_model
from asyncllm.models.spec import ModelSpec

log = logging.getLogger(__name__)

#: On a CPU the KV cache takes at most this share of the memory that is free.
CPU_CACHE_SHARE = 0.25


def build_worker(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    progress: Callable[[int, int], None] | None = None,
) -> Worker:
    """Load the model and size the KV cache.

    Args:
        progress: called in this thread with bytes of weights loaded so far, and in all.

    Raises:
        ModelError: the device is not there, the weights are not as the model needs them, or the
            memory does not suffice; the message names what and which option helps.
    """
    device = _open_device(config)
    try:
        return _build(device, config, folder, spec, progress)
    except BaseException as error:
        with suppress(RuntimeError):  # of a lost device: the error itself says more
            device.release()
        # PyTorch's allocators raise RuntimeErrors.
        if not isinstance(error, MemoryError | RuntimeError) or not _out_of_memory(error):
            raise
        raise ModelError(
            f"out of memory while loading: {str(error).splitlines()[0]} (a smaller kv_cache_tokens,"
            " max_model_len or max_num_seqs, or dtype bfloat16, needs less)"
        ) from None


def _out_of_memory(error: Exception) -> bool:
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "not enough memory" in str(error) or "can't allocate" in str(error)


def _build(
    device: Device,
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    progress: Callable[[int, int], None] | None,
) -> Worker:
    dtype = _compute_dtype(config, device)
    budget = _memory_budget(config, device)
    with torch.inference_mode():
        before = device.free_bytes()
        model = load_model(
            folder,
            spec,
            dtype=dtype,
            device=device.torch_device,
            load_format=config.load_format,
            progress=progress,
            max_length=config.max_model_len,
        )
        weights = max(before - device.free_bytes(), 0)
        kind = device.torch_device.type
        limits = resolve_limits(
            config,
            spec,
            device=kind,
            dtype=str(dtype).removeprefix("torch."),
            cache_bytes=budget - weights if kind == "cuda" else budget,
            host_bytes=available_host_bytes(),
            bytes_per_token=spec.kv_bytes_per_token(dtype.itemsize),
        )
        pool = KVPool(
            spec.num_layers,
            limits.num_pages,
            limits.page_size,
            spec.num_kv_heads,
            spec.head_dim,
            dtype,
            device.torch_device,
        )
        copier = PageCopier(pool, HostPool(pool, limits.host_pages, device), device)
        copier.warm_up()
        max_pages = -(-limits.max_model_len // limits.page_size)
        backend = choose_backend(
            config.attention, pool, model.attention_specs, dtype, device.torch_device
        )
        sampler = Sampler(limits.max_num_seqs, spec.vocab_size, device.torch_device)
        table = SlotTable(limits.max_num_seqs, max_pages, device)
        forward = _forward(config, model, backend, sampler, table, limits, device)
        runner = ModelRunner(forward, sampler, table, copier, device)
    return Worker(runner, limits, device)


def _forward(
    config: EngineConfig,
    model: CausalLM,
    backend: AttentionBackend,
    sampler: Sampler,
    table: SlotTable,
    limits: EngineLimits,
    device: Device,
) -> StepForward:
    """How steps run: launched kernel by kernel, or, where kernels allow it, as graphs."""
    eager = EagerForward(model, backend, sampler, table, limits.page_size, device)
    if not config.cuda_graphs or not isinstance(backend, GraphBackend):
        return eager
    programs = StepPrograms(
        model,
        backend,
        table,
        limits.page_size,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
    )
    graphed = GraphedForward(programs, eager, sampler, table, device, limits.max_burst)
    graphed.capture()
    return graphed


def _open_device(config: EngineConfig) -> Device:
    if config.device == "cpu":
        return CpuDevice(config.cpu_threads)
    if torch.cuda.is_available():
        return CudaDevice()
    if config.device == "cuda":
        raise ModelError("device cuda: PyTorch sees no CUDA device", param="device")
    log.warning("no CUDA device: running on the CPU")
    return CpuDevice(config.cpu_threads)


def _compute_dtype(config: EngineConfig, device: Device) -> torch.dtype:
    on_cpu = device.torch_device.type == "cpu"
    if config.dtype == "auto":
        return torch.float32 if on_cpu else torch.bfloat16
    if config.dtype == "float16" and on_cpu:
        log.warning("float16 has no fast CPU kernels: computing in bfloat16")
        return torch.bfloat16
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[config.dtype]


def _memory_budget(config: EngineConfig, device: Device) -> int:
    """Bytes that weights and KV cache (on a CPU: the KV cache) may take."""
    share = CPU_CACHE_SHARE if device.torch_device.type == "cpu" else config.gpu_memory_utilization
    return int(device.free_bytes() * share)
