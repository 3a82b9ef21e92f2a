"""What fits on each GPU: the computation of a start, with sizes that are predicted."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import msgspec
import torch

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import ModelError
from asyncllm.executor.memory.limits import (
    GpuMemory,
    graph_bytes,
    resolve_limits,
    step_tokens,
)
from asyncllm.executor.memory.profile import StepMemory
from asyncllm.executor.sim.cost import H200
from asyncllm.executor.startup.step_memory import step_memory
from asyncllm.executor.step.padded_steps import step_sizes
from asyncllm.lab.planning.gpus import PlannedGpu
from asyncllm.lab.planning.rank import RankModel, torch_dtype

#: A step's memory as the allocator reserves it, to that of its tensors: 1.02 GiB to 0.89 were
#: measured with Qwen3-8B on an H200, and 0.44 to 0.37 with 0.6B.
RESERVED: Final = 1.16
#: Memory of a CUDA context.
CONTEXT_BYTES: Final = 500 << 20


class MemoryPlan(msgspec.Struct, frozen=True):
    """Bytes of each GPU's memory.

    Attributes:
        usable: the configured share of all.
        step: of the largest step.
        graphs: of all CUDA graphs.
        cache: left for the KV cache; what cannot be used stays free.
    """

    total: int
    usable: int
    weights: int
    step: int
    graphs: int
    cache: int


def plan_memory(
    config: EngineConfig, folder: Path, rank: RankModel, gpu: PlannedGpu
) -> tuple[MemoryPlan, EngineLimits]:
    """The memory of each of ``config.tp`` GPUs, and the limits of the engine.

    Raises:
        ModelError: as at the start: weights or cache do not fit.
    """
    step = predicted_step(config, folder, rank, gpu)
    graphs = graph_bytes(step.captured, rank.spec.num_layers) if config.cuda_graphs else 0
    total, share = gpu.total_bytes, config.gpu_memory_utilization
    before, weights = total - CONTEXT_BYTES, rank.weight_bytes + rank.table_bytes
    memory = GpuMemory(
        total=total,
        before=before,
        free=before - weights,
        weights=weights,
        step=int(RESERVED * step.step),
        graphs=graphs,
    )
    if memory.free < 0:
        raise ModelError(f"the weights do not fit: {memory.account(share)}", param="tp")
    dtype = torch_dtype(config, gpu.for_kernels)
    cache = memory.cache_bytes(share)
    limits = resolve_limits(
        config,
        rank.spec,
        device="cuda",
        dtype=str(dtype).removeprefix("torch."),
        cache_bytes=cache,
        host_bytes=int(H200.host_memory),
        bytes_per_token=rank.work.kv_bytes,
        account=memory.account(share),
        step_sizes=step_sizes(rank.captured_tokens),
    )
    plan = MemoryPlan(total, int(share * total), weights, memory.step, graphs, cache)
    return plan, limits


def predicted_step(
    config: EngineConfig, folder: Path, rank: RankModel, gpu: PlannedGpu
) -> StepMemory:
    """The memory of the tensors of the largest steps; roughly, where there is no Triton."""
    dtype = torch_dtype(config, gpu.for_kernels)
    if find_spec("triton") is None:
        return _rough_step(config, rank, dtype)
    # Its own process: Triton's launchers remember the GPU that they were recorded for.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(step_memory, folder, config, dtype, gpu.for_kernels).result()


def _rough_step(config: EngineConfig, rank: RankModel, dtype: torch.dtype) -> StepMemory:
    """Activations of the MLP, which are the largest, and the sampler's tables."""
    spec = rank.spec
    per_token = 2.0 * spec.hidden_size * dtype.itemsize
    # A dense layer has about four attention matrices of hidden x hidden, and three of the MLP.
    layer = rank.work.token_flops / 2 / spec.num_layers / spec.hidden_size
    per_token += max(layer - spec.hidden_size, spec.hidden_size) * dtype.itemsize
    tables = 6 * config.max_num_seqs * spec.vocab_size
    captured = rank.captured_tokens * per_token + 2 * config.max_num_seqs * spec.vocab_size
    return StepMemory(int(step_tokens(config, "cuda") * per_token + tables), int(captured))
