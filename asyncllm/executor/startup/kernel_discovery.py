"""Find the Triton kernels that serving a model launches, by running its steps without a GPU.

Model, tables and buffers are those of serving, on the meta device, where tensors have no contents.
So the launched variants are those of serving with the same sizes. Of layers that are alike a few
run: see ``first_layers``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.choose import own_backend, warm_up
from asyncllm.config import EngineConfig, most_drafted
from asyncllm.executor.choose_device import cache_dtype, chosen_attention, chosen_kernels
from asyncllm.executor.device import CpuDevice
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.executor.memory.limits import step_tokens, wanted_length
from asyncllm.executor.memory.profile import StepSize, largest_steps
from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.startup.triton_prebuild import Variant, recorded_launches
from asyncllm.executor.step.drafter import HeadDrafter
from asyncllm.executor.step.eager import EagerForward
from asyncllm.executor.step.padded_steps import PaddedSteps, captured_tokens
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.kernels.attention import apply_sinks
from asyncllm.kernels.gpu import Gpu, gpu_of
from asyncllm.kernels.tokens import list_pages
from asyncllm.models.first_layers import first_layers
from asyncllm.models.loading.allocate import kernels_take
from asyncllm.models.loading.draft_head import make_with_head
from asyncllm.models.spec import ModelSpec
from asyncllm.parallel.ranks import Alone, Ranks


def find_variants(
    spec: ModelSpec,
    dtype: torch.dtype,
    config: EngineConfig,
    gpu: Gpu,
    found: Callable[[Variant], object] | None = None,
) -> list[Variant]:
    """The variants that serving the model on that GPU launches, as far as they can be foreseen.

    Args:
        config: the lengths and sizes of serving.
        found: called with each variant as soon as it is found; the slowest to compile come early.

    Raises:
        ModelError: the model is not supported, or not with this configuration.
    """
    with recorded_launches(gpu, found) as variants:
        run_steps(spec, dtype, config)
    return variants


def run_steps(spec: ModelSpec, dtype: torch.dtype, config: EngineConfig) -> EagerForward:
    """Run the data-independent start-up steps on the meta device.

    Returns:
        The forward for steps that are not captured, to run more of them.
    """
    device = MetaDevice()
    meta = device.torch_device
    length, page_size, max_rows = wanted_length(config, spec), config.page_size, config.max_num_seqs
    keep = kernels_take(spec.quantization, dtype, gpu_of(meta))
    ranks, kernels = _recorded_ranks(config.tp), chosen_kernels(config)
    whole = make_with_head(spec, dtype, meta, length, keep=keep, ranks=ranks, kernels=kernels)
    most_captured = min(step_tokens(config, "cuda"), captured_tokens(whole))
    model = first_layers(whole)
    of_cache = cache_dtype(config, dtype, gpu_of(meta))
    pool = KVPool(model.cached_specs, 1, page_size, of_cache, meta)
    backend = own_backend(chosen_attention(config))(pool, device.upload)
    # First, as prompt attention takes longest to compile: what follows has torch import its
    # compiler and sympy, for shapes on the meta device.
    warm_up(backend, model.cached_specs, dtype, meta)
    sampler = Sampler(max_rows, spec.vocab_size, device)
    drafts = most_drafted(config.speculative_config, max_rows)
    table = SlotTable(max_rows, -(-length // page_size), device, drafts)
    if config.attention == "flashinfer" or not gpu_of(meta).has_pdl:
        # FlashInfer's backend launches these kernels of ours, which PagedBackend does not.
        slots = torch.zeros(1, dtype=torch.int32, device=meta)
        list_pages(table.block_table, slots, torch.zeros(2, dtype=torch.int32, device=meta))
        with_sinks = (spec for spec in model.cached_specs if spec.has_sinks)
        for shape in {(1, spec.num_heads, spec.head_dim) for spec in with_sinks}:
            out = torch.empty(shape, dtype=dtype, device=meta)
            sinks = torch.empty(shape[1], dtype=dtype, device=meta)
            apply_sinks(out, torch.empty(shape[:2], device=meta), sinks)
    states = StatePool(model.states, 1, dtype, meta)
    eager = EagerForward(model, backend, states, sampler, table, page_size, device)
    sampler.warm_up(dtype)
    table.warm_up()
    states.warm_up(device.upload)
    size = StepSize(max_rows, step_tokens(config, "cuda"), length, most_captured, page_size)
    for step in largest_steps(size, spec.vocab_size, table, sampler):
        eager(step)
    padded = PaddedSteps(model, backend, states, table, page_size, max_rows, most_captured)
    for captured in padded.decode_sizes + padded.mixed_sizes:
        flat = torch.empty(captured.num_ints, dtype=torch.int32, device=meta)
        logits, rows, _ = padded.run(captured, flat, padded.plan(captured, flat))
        for level in (Level.GREEDY, Level.FILTER):
            sampler.draw(logits, rows.slots, rows.lengths, level, relay=table.last_token)
    if model.head is not None:
        drafter = HeadDrafter(model.head, backend, table, page_size, device, length)
        for num_tokens, num_rows in (*padded.drafting_sizes, (size.tokens, max_rows)):
            drafter.warm_up(num_tokens, num_rows, dtype)
    return eager


def _recorded_ranks(size: int) -> Ranks:
    if size == 1:
        return Alone()
    # It imports Triton, which ``asyncllm doctor`` must do without on machines without a GPU.
    from asyncllm.executor.startup.recorded_ranks import RecordedRanks

    return RecordedRanks(size)


class MetaDevice(CpuDevice):
    """Tensors without contents."""

    def __init__(self) -> None:
        self.torch_device = torch.device("meta")

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.torch_device)

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        pass
