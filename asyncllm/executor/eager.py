"""A step whose kernels are launched one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from asyncllm.attention.base import AttentionBackend, ForwardBatch
from asyncllm.executor.device import Device
from asyncllm.executor.inputs import StepRows, stage
from asyncllm.executor.sampler import Sampled, Sampler
from asyncllm.executor.slots import SlotTable
from asyncllm.models.base import CausalLM

if TYPE_CHECKING:
    from asyncllm.executor.logprobs import Logprobs


class StepForward(Protocol):
    """From the rows of a step to sampled tokens, which are relayed to the next step's rows."""

    def __call__(self, step: StepRows, burst: int = 1) -> Samples | None:
        """Queue the kernels; None when no row samples. Good until the next call.

        Args:
            burst: how many tokens each row yields; more than one of decode rows only.
        """


@dataclass(frozen=True, slots=True)
class Samples:
    """What the rows that sample yield, on the device.

    ``tokens`` is int64 [burst, samples]; ``logprobs`` has one for each of the burst, or none.
    """

    tokens: Tensor
    logprobs: tuple[Logprobs | None, ...] = ()

    @classmethod
    def of(cls, burst: list[Sampled]) -> Self:
        """One after the other; at least one."""
        first = burst[0].tokens
        tokens = first.unsqueeze(0) if len(burst) == 1 else torch.stack([s.tokens for s in burst])
        logprobs = tuple(sampled.logprobs for sampled in burst)
        return cls(tokens, logprobs if any(logprobs) else ())


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

    def __call__(self, step: StepRows, burst: int = 1) -> Samples | None:
        sampled = [self._run(step.continued(after)) for after in range(burst)]
        done = [part for part in sampled if part is not None]
        return Samples.of(done) if done else None

    def _run(self, step: StepRows) -> Sampled | None:
        inputs = stage(step, self._table, self._page_size, self._device)
        batch = ForwardBatch(
            *inputs.tokens,
            sample_rows=inputs.sample_rows,
            backend=self._backend,
            plan=self._backend.plan(step.rows, self._table.block_table),
            ends=inputs.ends,
        )
        hidden = self._model(batch)
        if len(step.sampling) == 0:
            return None
        sampled = self._sampler.sample(self._model.logits(hidden), step.slots, step.lengths)
        self._table.relay(inputs.sample_slots, sampled.tokens)
        return sampled
