"""Measure the memory of the largest steps; the KV cache gets the rest.

The largest steps that can be planned run once, kernel by kernel, over a KV pool of a single page to
which all block tables point: K and V overwrite each other, which changes nothing else. The
allocator's peak is the memory that steps need, with attention workspaces and the sampler's tables.
It depends on shapes only, so it is the same at every start. Of layers that are alike a few run: see
``first_layers``.

On an H200, with kernels compiled but not loaded yet: 0.5 s; 0.44 GiB for Qwen3-0.6B, 1.02 GiB for
8B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend
from asyncllm.errors import ModelError
from asyncllm.executor.device import Device
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.executor.memory.limits import gib
from asyncllm.executor.sampling.needs import costly_params
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.drafter import HeadDrafter
from asyncllm.executor.step.eager import EagerForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.models.base import CausalLM
from asyncllm.models.first_layers import first_layers
from asyncllm.models.spec import ModelSpec
from asyncllm.wire.messages import Admit, RowParams, pack

_GREEDY = RowParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step: rows, tokens of all rows, tokens of one row.

    ``captured_tokens`` are the tokens of the largest step captured as a graph; 0: none is captured.
    """

    rows: int
    tokens: int
    row_tokens: int
    captured_tokens: int
    page_size: int


class StepMemory(NamedTuple):
    """Bytes of device memory.

    Attributes:
        step: the peak of a step launched kernel by kernel, besides weights and KV pages.
        captured: activations of the largest captured step, which its graph keeps.
    """

    step: int
    captured: int


def measure_step(
    model: CausalLM,
    spec: ModelSpec,
    make_backend: Callable[[KVPool], AttentionBackend],
    size: StepSize,
    dtype: torch.dtype,
    device: Device,
    of_cache: torch.dtype | None = None,
) -> StepMemory:
    """Run the largest steps on a GPU; afterwards all their memory is free again.

    Args:
        make_backend: makes the attention backend that will serve.
        dtype: of the computation.
        of_cache: of the KV pool, if it is another.

    Raises:
        ModelError: they do not fit; the message says which options make them smaller.
    """
    cuda = device.torch_device
    device.empty_cache()
    reserved = torch.cuda.memory_reserved(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    try:
        peak, captured = _peaks(model, spec, make_backend, size, dtype, device, of_cache)
    except torch.OutOfMemoryError:
        raise ModelError(
            f"a step of {size.tokens} tokens and {size.rows} rows does not fit into the "
            f"{gib(device.free_bytes())} that {gib(reserved)} of weights leave free: lower "
            "max_num_batched_tokens or max_num_seqs",
            param="max_num_batched_tokens",
        ) from None
    finally:
        device.empty_cache()
    return StepMemory(peak - reserved, captured)


def _peaks(
    model: CausalLM,
    spec: ModelSpec,
    make_backend: Callable[[KVPool], AttentionBackend],
    size: StepSize,
    dtype: torch.dtype,
    device: Device,
    of_cache: torch.dtype | None,
) -> tuple[int, int]:
    """The peak of reserved bytes, and ``StepMemory.captured``. Keeps nothing."""
    cuda = device.torch_device
    pool = KVPool(model.cached_specs, 1, size.page_size, of_cache or dtype, cuda)
    sampler = Sampler(size.rows, spec.vocab_size, device)
    table = SlotTable(size.rows, -(-size.row_tokens // size.page_size), device)
    states = StatePool(model.states, 1, dtype, cuda)
    parts = first_layers(model), make_backend(pool), states, sampler, table, size.page_size, device
    forward = EagerForward(*parts)
    drafter = None
    if forward.model.head is not None:
        parts_of_head = forward.backend, table, size.page_size, device, size.row_tokens
        drafter = HeadDrafter(forward.model.head, *parts_of_head)
    for step in largest_steps(size, spec.vocab_size, table, sampler):
        with device.exclusive():
            samples = forward(step)
            if drafter is not None and samples is not None and samples.taken is not None:
                sampled = samples.tokens[0], samples.columns
                drafter.draft(step, *sampled, samples.taken, None, 1)
    peak = torch.cuda.max_memory_reserved(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    allocated = torch.cuda.memory_allocated(cuda)
    if size.captured_tokens > 0:
        step = captured_step(size, table, sampler)
        with device.exclusive():
            forward(step)
    captured = torch.cuda.max_memory_allocated(cuda) - allocated
    device.check()
    return max(peak, torch.cuda.max_memory_reserved(cuda)), captured


def largest_steps(
    size: StepSize, vocab_size: int, table: SlotTable, sampler: Sampler
) -> Iterator[StepRows]:
    """Admit prompts, and yield the steps that take the most memory: few long rows, and all rows.

    Every row samples, with parameters that need every sampling kernel: all at once in some rows,
    and one at a time in others, whose scores then change in the dtype of the logits.
    """
    kinds = costly_params(vocab_size)
    few = min(-(-size.tokens // size.row_tokens), size.rows)
    for rows in dict.fromkeys((few, size.rows)):
        q_len = max(min(size.tokens // rows, size.row_tokens), 1)
        for slot in range(rows):
            _admit(slot, q_len, kinds[slot % len(kinds)], table, sampler)
        yield StepRows.of(_rows(rows, q_len), table)


def captured_step(size: StepSize, table: SlotTable, sampler: Sampler) -> StepRows:
    """Admit greedy sequences, and return the largest captured step."""
    q_len = max(min(size.captured_tokens // size.rows, size.row_tokens), 1)
    for slot in range(size.rows):
        _admit(slot, q_len, _GREEDY, table, sampler)
    return StepRows.of(_rows(size.rows, q_len), table)


def _admit(
    slot: int, num_tokens: int, params: RowParams, table: SlotTable, sampler: Sampler
) -> None:
    tokens = table.admit(Admit(slot, pack([0] * num_tokens), num_tokens, params))
    sampler.admit(slot, params, tokens, num_tokens)


def _rows(count: int, q_len: int) -> np.ndarray:
    """int32 [count, 3] of (slot, 0, q_len)."""
    rows = np.empty((count, 3), dtype=np.int32)
    rows[:] = 0, 0, q_len
    rows[:, 0] = np.arange(count)
    return rows
