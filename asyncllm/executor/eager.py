"""A step whose kernels are launched one by one."""

from __future__ import annotations

from typing import Protocol

from asyncllm.attention.base import AttentionBackend, ForwardBatch
from asyncllm.executor.device import Device
from asyncllm.executor.inputs import StepRows, stage
from asyncllm.executor.sampler import Sampled, Sampler
from asyncllm.executor.slots import SlotTable
from asyncllm.models.base import CausalLM


class StepForward(Protocol):
    """From the rows of a step to sampled tokens, which are relayed to the next step's rows."""

    def __call__(self, step: StepRows) -> Sampled | None:
        """Queue the kernels; None when no row samples. Good until the next call."""


class EagerForward:
    """``StepForward`` for any rows on any device."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        sampler: Sampler,
        table: SlotTable,
        page_size: int,
        device: Device,
    ):
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._table = table
        self._page_size = page_size
        self._device = device

    def __call__(self, step: StepRows) -> Sampled | None:
        inputs = stage(step, self._table, self._page_size, self._device)
        batch = ForwardBatch(
            *inputs.tokens,
            sample_rows=inputs.sample_rows,
            backend=self._backend,
            plan=self._backend.plan(step.rows, self._table.block_table),
        )
        hidden = self._model(batch)
        if len(step.sampling) == 0:
            return None
        sampled = self._sampler.sample(self._model.logits(hidden), step.slots, step.lengths)
        self._table.relay(inputs.sample_slots, sampled.tokens)
        return sampled
