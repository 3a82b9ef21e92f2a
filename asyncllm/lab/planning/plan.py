"""What fits on given GPUs, and how fast it will be."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import ModelError
from asyncllm.executor.memory.limits import GpuMemory, graph_bytes, resolve_limits, step_tokens
from asyncllm.executor.memory.profile import StepMemory
from asyncllm.executor.sim.cost import H200
from asyncllm.executor.startup.step_memory import step_memory
from asyncllm.executor.step.padded_steps import step_sizes
from asyncllm.lab.planning.cost import PredictedCost, is_measured
from asyncllm.lab.planning.gpus import PlannedGpu, find_planned
from asyncllm.lab.planning.load import LoadPlan
from asyncllm.lab.planning.predict import Prediction, predict
from asyncllm.lab.planning.rank import RankModel, rank_model, torch_dtype
from asyncllm.models.spec import ModelSpec

#: Context lengths for which sequences are counted, as far as the model has them.
LENGTHS: Final = (1024, 4096, 16384)
#: Rows of the decode steps whose rates are given.
ROWS: Final = (1, 8, 32, 64, 256)

_MEASURED: Final = (
    "Step times are measured: this model on one H200. In eight loads of 0.6B and 8B, simulated "
    "tokens/s and times per token were within 3 % of those measured over HTTP, the median TTFT "
    "within 11 % (8B with 256 clients: 26 %), p99 of TTFT within 23 % and of ITL within 16 %."
)
_ESTIMATED: Final = (
    "Step times are estimated from those of Qwen3-0.6B and 8B on one H200. How far off that can "
    "be: from 0.6B's steps alone, 8B's time per token comes out within 6 %, tokens/s within 2 %, "
    "median TTFT within 7 % (one client: 21 %); from 8B's steps, 0.6B's within 5, 6 and 10 %."
)
_HOST: Final = (
    "Times of HTTP and of the event loop are those of a machine on which that was measured."
)
_OTHER_GPU: Final = (
    "Nothing was measured on {}: it is taken to reach the same shares of its data sheet as the "
    "H200 (bandwidth 89 %, 16-bit matmuls 65 %)."
)
_TP: Final = (
    "With tp 2 on H200s, single tokens of 8B were measured to take 5 to 7 % longer "
    "than is predicted; nothing else with tp > 1 was measured. Sums over the ranks take {}."
)
_SUMS_MEASURED: Final = "what they were measured to take on two H200s"
_SUMS_ESTIMATED: Final = "an estimate, from what they were measured to take on two H200s"
_SUMS_PCIE: Final = "a guess: nothing was measured over PCIe"
_DP: Final = (
    "Replicas are taken to share the requests evenly; routing is not simulated, and they do not "
    "slow each other down."
)
_ESTIMATED_EXPERTS: Final = (
    "Step times are estimated from those of Qwen3-30B-A3B in bfloat16 on one H200. Steps of the "
    "same model in fp8 take up to 15 % longer than that. Those of gpt-oss-20b and 120b, in mxfp4, "
    "take 35 to 55 % longer with 32 and 64 rows."
)
_LIMIT: Final = (
    "Tokens/s are of decode steps with 1,024 tokens cached of each sequence. The limit is the time "
    "to read weights, keys and values at the bandwidth that matmuls reach, or to multiply, without "
    "any between kernels; experts are taken to be drawn at random."
)
_PADDED: Final = (
    "Experts' features are divided between their scales, and padded to equal parts: {:,.2f} GiB of "
    "each GPU's weights."
)
_QUANTISED: Final = {
    "all": "{} weights are read as they are stored; arithmetic counts as in 16 bits.",
    "large": "{} weights are read as they are stored, but for small ones, which are faster in 16 "
    "bits; arithmetic counts as in 16 bits.",
    "experts": "{} weights of experts are read as they are stored. Others are expanded to 16 bits, "
    "as this GPU has no kernels for them.",
    "none": "{} weights are expanded to 16 bits, as this GPU has no kernels for them.",
}


class Placement(NamedTuple):
    """So many GPUs of a kind: ``dp`` replicas, each on ``tp`` of them."""

    gpu: str
    tp: int = 1
    dp: int = 1

    def __str__(self) -> str:
        split = [f"{name} {n}" for name, n in (("tp", self.tp), ("dp", self.dp)) if n > 1]
        return f"{self.tp * self.dp} x {self.gpu}" + (f" ({', '.join(split)})" if split else "")


class DecodeRate(msgspec.Struct, frozen=True):
    """Tokens a second of decode steps, with 1,024 tokens cached of each row.

    Attributes:
        limit: what the GPU's bandwidth and arithmetic allow, without the time between kernels and
            that of sums over ranks.
    """

    rows: int
    estimated: float
    limit: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A model on some GPUs. Memory is in bytes, of each GPU; times are in seconds.

    Attributes:
        kv_bytes_per_token: on each GPU.
        kv_tokens, pages: of each replica's KV cache.
        state_bytes, states: of a sequence's recurrent state on each GPU, and slots for such states.
        longest: sequence, prompt and output.
        sequences: how many of a length run at once in a replica, by length.
        decode_seconds: of a decode step of one row, with 1,024 tokens cached.
        decode_rates: of such steps of several rows, as many as fit.
        sums_per_step: over the ranks.
        rank_seconds: what the ranks exchange in that decode step.
        is_measured: whether step times are this model's, measured on this GPU.
        notes: what figures rest on, and how far off they may be.
    """

    gpu: str
    tp: int
    dp: int
    memory: MemoryPlan
    kv_bytes_per_token: int
    kv_tokens: int
    pages: int
    state_bytes: int
    states: int
    longest: int
    sequences: dict[int, int]
    decode_seconds: float
    decode_rates: list[DecodeRate]
    sums_per_step: int
    rank_seconds: float
    is_measured: bool
    predictions: list[Prediction]
    notes: list[str]


def make_plan(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    where: Placement,
    loads: Sequence[LoadPlan] = (),
    lengths: Sequence[int] = LENGTHS,
) -> Plan:
    """Plan for a model; only its configuration is read.

    Args:
        config: as it will be served; its ``tp`` is that of ``where``.

    Raises:
        ModelError: the model cannot be divided, or does not fit, as at the start.
        BadRequest: there is no such GPU, or a load does not suit the model.
        TraceError, OSError: a trace cannot be read.
    """
    config = msgspec.structs.replace(config, tp=where.tp)
    gpu = find_planned(where.gpu)
    rank = rank_model(config, spec, gpu.for_kernels)
    memory, limits = plan_memory(config, folder, rank, gpu)
    cost = PredictedCost(rank, gpu, where.tp)
    capacity = limits.num_pages * limits.page_size
    shown = [*(n for n in lengths if n < limits.max_model_len), limits.max_model_len]
    cached = min(1024, limits.max_model_len - 1)
    rates = [
        _decode_rate(cost, rows, cached)
        for rows in ROWS
        if rows <= min(capacity // (cached + 1), limits.max_num_seqs)
    ]
    return Plan(
        gpu=where.gpu,
        tp=where.tp,
        dp=where.dp,
        memory=memory,
        kv_bytes_per_token=rank.work.kv_bytes,
        kv_tokens=capacity,
        pages=limits.num_pages,
        state_bytes=limits.state_bytes,
        states=limits.num_states,
        longest=limits.max_model_len,
        sequences={n: min(capacity // n, limits.max_num_seqs) for n in shown},
        decode_seconds=1 / rates[0].estimated,
        decode_rates=rates,
        sums_per_step=rank.num_sums,
        rank_seconds=cost.rank_seconds(1, 1),
        is_measured=cost.is_measured,
        predictions=[predict(load, limits, cost, config.policy, where.dp) for load in loads],
        notes=_notes(where, rank, cost),
    )


def _decode_rate(cost: PredictedCost, rows: int, cached: int) -> DecodeRate:
    step = np.full(rows, cached), np.ones(rows, np.int64), rows
    return DecodeRate(rows, rows / cost.seconds(*step), rows / cost.least_seconds(*step))


def _notes(where: Placement, rank: RankModel, cost: PredictedCost) -> list[str]:
    gpu, quantization = find_planned(where.gpu), rank.spec.quantization
    estimated = _ESTIMATED_EXPERTS if rank.work.expert_bytes else _ESTIMATED
    notes = [_MEASURED if cost.is_measured else estimated, _HOST]
    if gpu.title != "NVIDIA H200":
        notes.append(_OTHER_GPU.format(gpu.title))
    if where.tp > 1:
        known = _SUMS_MEASURED if is_measured(gpu, where.tp) else _SUMS_ESTIMATED
        notes.append(_TP.format(known if gpu.has_nvlink else _SUMS_PCIE))
    if where.dp > 1:
        notes.append(_DP)
    notes.append(_LIMIT)
    if rank.padded_bytes:
        notes.append(_PADDED.format(rank.padded_bytes / 2**30))
    if quantization is not None:
        notes.append(_QUANTISED[rank.kept].format(quantization.method))
    return notes


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
        cache: left for the KV cache and recurrent states; what cannot be used stays free.
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
        state_bytes=rank.work.state_bytes,
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
