"""The memory of the largest steps, found on the meta device: for a GPU that is not here.

The steps are those that ``asyncllm.executor.memory.profile`` measures on a GPU, and every tensor
that they allocate is counted for as long as it lives.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncllm.attention.choose import own_backend
from asyncllm.config import EngineConfig
from asyncllm.executor.choose_device import cache_dtype, chosen_attention, chosen_kernels
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.executor.memory.limits import step_tokens, wanted_length
from asyncllm.executor.memory.profile import StepMemory, StepSize, captured_step, largest_steps
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.startup.kernel_discovery import MetaDevice
from asyncllm.executor.startup.triton_prebuild import recorded_launches
from asyncllm.executor.step.drafter import HeadDrafter
from asyncllm.executor.step.eager import EagerForward
from asyncllm.executor.step.padded_steps import captured_tokens
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.kernels.gpu import Gpu
from asyncllm.models.first_layers import first_layers
from asyncllm.models.loading.allocate import kernels_take
from asyncllm.models.loading.draft_head import make_with_head
from asyncllm.models.served_spec import served_spec
from asyncllm.parallel.ranks import Apart

#: Bytes of a CUDA allocation are a multiple of this.
BLOCK: Final = 512


def step_memory(folder: Path, config: EngineConfig, dtype: torch.dtype, gpu: Gpu) -> StepMemory:
    """The memory of a rank's largest steps, beside weights and KV pages.

    In a process of its own: see ``recorded_launches``.

    Args:
        folder: of the model; only its configuration is read.

    Raises:
        ModelError: the model cannot be served, or not with this configuration.
    """
    with recorded_launches(gpu):
        return _step_memory(folder, config, dtype, gpu)


def _step_memory(folder: Path, config: EngineConfig, dtype: torch.dtype, gpu: Gpu) -> StepMemory:
    spec, device = served_spec(folder, config), MetaDevice()
    meta, length, page_size = device.torch_device, wanted_length(config, spec), config.page_size
    ranks, max_rows = Apart(0, config.tp), config.max_num_seqs
    keep = kernels_take(spec.quantization, dtype, gpu)
    kernels = chosen_kernels(config)
    whole = make_with_head(spec, dtype, meta, length, keep=keep, ranks=ranks, kernels=kernels)
    captured = min(step_tokens(config, "cuda"), captured_tokens(whole))
    model = first_layers(whole)
    of_cache = cache_dtype(config, dtype, gpu)
    pool = KVPool(model.cached_specs, 1, page_size, of_cache, meta)
    size = StepSize(max_rows, step_tokens(config, "cuda"), length, captured, page_size)
    with _Allocations() as allocations:
        sampler = Sampler(max_rows, spec.vocab_size, device)
        table = SlotTable(max_rows, -(-length // page_size), device)
        backend = own_backend(chosen_attention(config))(pool, device.upload)
        states = StatePool(model.states, 1, dtype, meta)
        forward = EagerForward(model, backend, states, sampler, table, page_size, device)
        drafter = None
        if model.head is not None:
            drafter = HeadDrafter(model.head, backend, table, page_size, device, length)
        for step in largest_steps(size, spec.vocab_size, table, sampler):
            samples = forward(step)
            if drafter is not None and samples is not None and samples.taken is not None:
                sampled = samples.tokens[0], samples.columns
                drafter.draft(step, *sampled, samples.taken, None, 1)
        largest = allocations.peak
        before = allocations.peak = allocations.allocated
        if captured:
            forward(captured_step(size, table, sampler))
    return StepMemory(largest, allocations.peak - before)


class _Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are made, until nothing uses them.

    Attributes:
        held, peak: bytes now, and the most so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._storages:
                self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK

        def freed(_: object) -> None:
            del self._storages[key]
            self.allocated -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_meta]
