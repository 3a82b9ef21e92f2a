"""Assemble a worker: device, weights, KV cache, kernels. Runs in the executor thread."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# CPU kernels that share their cores must not spin at barriers: one busy neighbour slows them down
# by a factor of 10 to 100. OpenMP reads this once, when torch is first imported.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from msgspec.structs import replace
from torch import Tensor

from asyncllm.attention.base import AttentionBackend, GraphBackend
from asyncllm.attention.choose import choose_backend
from asyncllm.config import EngineConfig, EngineLimits, synthetic_rate
from asyncllm.errors import ModelError
from asyncllm.executor.choose_device import (
    cache_dtype,
    check_deterministic,
    chosen_attention,
    chosen_kernels,
    compute_dtype,
    open_device,
)
from asyncllm.executor.compile_watch import CompileWatch
from asyncllm.executor.device import Device, available_host_bytes
from asyncllm.executor.memory.copies import PageCopier
from asyncllm.executor.memory.kv_pool import HostPool, KVPool
from asyncllm.executor.memory.kv_scales import kv_scales
from asyncllm.executor.memory.limits import (
    GpuMemory,
    graph_bytes,
    resolve_limits,
    step_tokens,
    wanted_length,
)
from asyncllm.executor.memory.profile import StepSize, measure_step
from asyncllm.executor.runner import ModelRunner
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.sampling.token_constraint import Grammars
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.executor.step.drafter import HeadDrafter
from asyncllm.executor.step.eager import EagerForward, StepForward
from asyncllm.executor.step.graphs import GraphedForward
from asyncllm.executor.step.padded_steps import (
    PaddedSteps,
    captured_tokens,
    row_buckets,
    step_sizes,
)
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.executor.step.synthetic import SyntheticAcceptance
from asyncllm.executor.worker import Worker
from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.support import obstacle, say_what_runs
from asyncllm.models.base import CausalLM
from asyncllm.models.loading.draft_head import load_with_head
from asyncllm.models.spec import ModelSpec
from asyncllm.parallel.ranks import Alone, Ranks, RanksBroken

log = logging.getLogger(__name__)

#: The share of free memory that the KV cache takes on a CPU.
CPU_CACHE_SHARE = 0.25

MakeBackend = Callable[[KVPool], AttentionBackend]
Join = Callable[[torch.device], Ranks]


def build_worker(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    progress: Callable[[int, int], None] | None = None,
    bill: StartupBill | None = None,
    grammars: Grammars[Any] | None = None,
    await_kernels: Callable[[], None] = lambda: None,
    rank: int = 0,
    ranks_here: int | None = None,
    join: Join = lambda _: Alone(),
) -> Worker:
    """Load the model, or one rank's share of it, and size the KV cache.

    Args:
        progress: called in this thread with bytes of weights loaded and in total.
        bill: records what each phase took.
        grammars: the model's, for rows that have one.
        await_kernels: waits for Triton's kernels that are being compiled; called before most are
            launched, and only if they run here.
        ranks_here: how many this machine has, if not all; ranks of a machine are consecutive.
        join: joins the other ranks, once the device is open.

    Raises:
        ModelError: there is no such device, the weights do not fit the model, or the memory does
            not suffice; the message says which option helps.
    """
    bill = bill or StartupBill()
    ranks_here = ranks_here or config.tp
    with bill.phase("device"):
        device = open_device(config, rank % ranks_here, ranks_here)
        watch = _watch_compiler(device, config)
        ranks = join(device.torch_device)
    try:
        parts = folder, spec, progress, bill, grammars, await_kernels, ranks, ranks_here
        return _build(device, watch, config, *parts)
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


def _watch_compiler(device: Device, config: EngineConfig) -> CompileWatch:
    """Watch from the first kernel on, which shows whether Triton works here."""
    watch = CompileWatch()
    if device.torch_device.type == "cuda":
        watch.install(config.kernel_cache)
        say_what_runs(device.torch_device)
    return watch


def _build(
    device: Device,
    watch: CompileWatch,
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    progress: Callable[[int, int], None] | None,
    bill: StartupBill,
    grammars: Grammars[Any] | None,
    await_kernels: Callable[[], None],
    ranks: Ranks,
    ranks_here: int,
) -> Worker:
    dtype, on_device = compute_dtype(config, device), device.torch_device
    gpu = gpu_of(on_device) if on_device.type == "cuda" else None
    of_cache = cache_dtype(config, dtype, gpu)
    attention, kernels = chosen_attention(config), chosen_kernels(config)
    if config.deterministic:
        check_deterministic(spec, on_device)
    if spec.predicts_ahead and on_device.type == "cuda":
        raise ModelError(
            "speculative_config: the method mtp has not been run on a GPU; only CPUs serve it",
            param="speculative_config",
        )
    free_before = device.free_bytes()

    def make_backend(pool: KVPool) -> AttentionBackend:
        layers = model.cached_specs
        return choose_backend(attention, pool, layers, dtype, on_device, device.upload)

    with torch.inference_mode():
        with bill.phase("weights", device.free_bytes):
            load_format, length = config.load_format, config.max_model_len
            source = folder, spec, dtype, on_device, load_format, progress
            model = load_with_head(*source, max_length=length, ranks=ranks, kernels=kernels)
            device.empty_cache()  # the memory of conversions, for the KV cache
            config = replace(config, host_kv_gib=config.host_kv_gib / ranks.size)
        with bill.phase("kernels"):
            # Others are not launched, and why has been logged.
            if on_device.type == "cuda" and obstacle(on_device) is None:
                await_kernels()
        with bill.phase("profile", device.free_bytes):
            measured = spec, model, make_backend, dtype, device, free_before, ranks, ranks_here
            limits, step_bytes = _limits(config, *measured, of_cache)
        with bill.phase("KV cache", device.free_bytes):
            sizes = limits.num_pages, limits.page_size
            scales: dict[int, Tensor] = {}
            if config.has_fp8_cache:
                stored = None if load_format == "dummy" else folder
                length = limits.max_model_len
                scales = kv_scales(model, stored, spec.vocab_size, length, dtype, device, ranks)
                device.empty_cache()
            pool = KVPool(model.cached_specs, *sizes, of_cache, on_device, scales)
            scratch = limits.max_draft_rows
            states = StatePool(model.states, limits.num_states, dtype, on_device, scratch)
            device.keep_block(step_bytes)
            host = HostPool(pool, limits.host_pages, device)
            copier = PageCopier(pool, host, device, states=states)
            copier.warm_up()
        with bill.phase("attention", device.free_bytes):
            backend = make_backend(pool)
        with bill.phase("graphs", device.free_bytes):
            sampler = Sampler(limits.max_num_seqs, spec.vocab_size, device, grammars, ranks)
            max_pages = -(-limits.max_model_len // limits.page_size)
            drafts = limits.max_draft_tokens
            table = SlotTable(limits.max_num_seqs, max_pages, device, drafts)
            if on_device.type == "cuda":
                sampler.warm_up(dtype)
                table.warm_up()
                states.warm_up(device.upload)
            eager = EagerForward(model, backend, states, sampler, table, limits.page_size, device)
            drafter = _drafter(config, eager, limits)
            graphed = _captured(config, eager, limits, ranks, drafter)
            forward: StepForward = graphed or eager
            if (rate := synthetic_rate(config.speculative_config)) is not None:
                log.warning("chance decides what is right of drafts: answers mean nothing")
                forward = SyntheticAcceptance(forward, rate, sampler, table, device)
        runner = ModelRunner(forward, sampler, table, copier, states, device, drafter)
    watch.start_serving()
    capture_next = graphed.capture_next if graphed else None
    return Worker(runner, limits, device, capture_next, watch, ranks)


def _drafter(config: EngineConfig, eager: EagerForward, limits: EngineLimits) -> HeadDrafter | None:
    """What drafts with the model's head, if it has one."""
    head, backend = eager.model.head, eager.backend
    if head is None:
        return None
    is_cuda = eager.device.torch_device.type == "cuda"
    sizes = row_buckets(limits.max_num_seqs) if is_cuda and config.cuda_graphs else []
    parts = eager.table, limits.page_size, eager.device, limits.max_model_len
    return HeadDrafter(head, backend, *parts, sizes)


def _limits(
    config: EngineConfig,
    spec: ModelSpec,
    model: CausalLM,
    make_backend: MakeBackend,
    dtype: torch.dtype,
    device: Device,
    free_before: int,
    ranks: Ranks,
    ranks_here: int,
    of_cache: torch.dtype,
) -> tuple[EngineLimits, int]:
    """Size the KV cache by the rank with the least memory.

    Args:
        free_before: the device's free memory before the weights.
        ranks_here: those that share this machine's memory.
        of_cache: the dtype of K and V.

    Returns:
        The limits, and the bytes that are left free for a step; 0 on a CPU.
    """
    resolve = partial(
        resolve_limits,
        config,
        spec,
        device=device.torch_device.type,
        dtype=str(dtype).removeprefix("torch."),
        host_bytes=available_host_bytes() // ranks_here,
        bytes_per_token=model.kv_bytes_per_token(of_cache.itemsize),
        state_bytes=model.state_bytes(dtype.itemsize),
    )
    if device.torch_device.type == "cpu":
        cache_bytes = int(free_before * CPU_CACHE_SHARE) // ranks_here
        return resolve(cache_bytes=ranks.least(cache_bytes)), 0
    weights = free_before - device.free_bytes()
    largest = _captured_tokens(config, model)
    size = StepSize(
        rows=config.max_num_seqs,
        tokens=step_tokens(config, "cuda"),
        row_tokens=wanted_length(config, spec),
        captured_tokens=largest,
        page_size=config.page_size,
    )
    step, captured = measure_step(model, spec, make_backend, size, dtype, device, of_cache)
    free, total = torch.cuda.mem_get_info(device.torch_device)
    graphs = graph_bytes(captured, spec.num_layers) if config.cuda_graphs else 0
    memory = GpuMemory(total, free_before, free, weights, step, graphs)
    share = config.gpu_memory_utilization
    log.info("memory: %s", memory.account(share))
    limits = resolve(
        cache_bytes=ranks.least(memory.cache_bytes(share)),
        account=memory.account(share),
        step_sizes=step_sizes(largest),
    )
    return limits, step


def _captured(
    config: EngineConfig,
    eager: EagerForward,
    limits: EngineLimits,
    ranks: Ranks,
    drafter: HeadDrafter | None,
) -> GraphedForward | None:
    """CUDA graphs of the steps that serving starts with; None where there are none."""
    model, backend = eager.model, eager.backend
    # All ranks, or none: one may lack the kernels.
    can_capture = config.cuda_graphs and isinstance(backend, GraphBackend)
    if not ranks.least(can_capture) or not isinstance(backend, GraphBackend):
        return None
    largest = _captured_tokens(config, model)
    sizes = limits.page_size, limits.max_num_seqs, largest
    drafts = config.speculative_config is not None
    padded = PaddedSteps(model, backend, eager.states, eager.table, *sizes)
    graphed = GraphedForward(padded, eager, limits, ranks, drafter, drafts=drafts)
    try:
        graphed.capture_first()
    except RanksBroken:
        raise
    except Exception as error:  # compilers and loaders raise various types
        eager.device.check()
        reason = str(error).partition("\n")[0]
        log.warning("steps are launched kernel by kernel, as they cannot be captured: %s", reason)
        return None
    return graphed


def _captured_tokens(config: EngineConfig, model: CausalLM) -> int:
    """The tokens of the largest mixed step that is captured."""
    if not config.cuda_graphs:
        return 0
    return min(captured_tokens(model), step_tokens(config, "cuda"))
