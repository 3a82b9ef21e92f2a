"""Steps whose kernels are launched one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import AttentionBackend, ForwardBatch
from asyncllm.executor.device import Device
from asyncllm.executor.sampling.sampler import Sampled, Sampler
from asyncllm.executor.step.inputs import StepInputs, StepRows, upload_step
from asyncllm.executor.step.pooling import PooledSums
from asyncllm.executor.step.prompt_logprobs import PromptLogprobs
from asyncllm.executor.step.slots import SlotTable
from asyncllm.models.base import CausalLM

if TYPE_CHECKING:
    from asyncllm.executor.sampling.logprobs import Logprobs


class StepForward(Protocol):
    """From the rows of a step to sampled tokens, which stay on the device for the next step."""

    def __call__(self, step: StepRows, decode_steps: int = 1) -> Samples | None:
        """Queue the kernels. The result, None if nothing is to be read, is valid until the next
        call.

        Args:
            decode_steps: tokens that each row yields; more than one for decode rows only.
        """


@dataclass(frozen=True, slots=True)
class Samples:
    """What the rows that sample yield, on the device.

    Attributes:
        tokens: int64 [decode_steps, columns].
        columns: int64 [samples] on the host; the columns of ``tokens`` that are read. None: all.
        logprobs: one for each decode step, or none.
        prompts, pooled: of the prompts that are scored or pooled.
        failures: (decode step, sample, reason) where the constraints leave no token.
    """

    tokens: Tensor
    logprobs: tuple[Logprobs | None, ...] = ()
    prompts: PromptLogprobs | None = None
    pooled: PooledSums | None = None
    failures: tuple[tuple[int, int, str], ...] = ()
    columns: np.ndarray | None = None

    @classmethod
    def of(cls, decode_steps: list[Sampled]) -> Self:
        """From one or more decode steps."""
        logprobs = tuple(sampled.logprobs for sampled in decode_steps)
        failures = tuple(
            (after, row, reason)
            for after, sampled in enumerate(decode_steps)
            for row, reason in sampled.failures.items()
        )
        if len(decode_steps) == 1:
            tokens = decode_steps[0].tokens.unsqueeze(0)
        else:
            tokens = torch.stack([sampled.tokens for sampled in decode_steps])
        return cls(tokens, logprobs if any(logprobs) else (), failures=failures)


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

    def __call__(self, step: StepRows, decode_steps: int = 1) -> Samples | None:
        if step.reads_prompts:
            return self._run_reading_prompts(step)
        sampled = [self._run(step.continued(after)) for after in range(decode_steps)]
        done = [part for part in sampled if part is not None]
        return Samples.of(done) if done else None

    def _run(self, step: StepRows) -> Sampled | None:
        inputs = upload_step(step, self._table, self._page_size, self._device)
        return self._sample(self._hidden(step, inputs), step, inputs)

    def _run_reading_prompts(self, step: StepRows) -> Samples:
        """A step with prompts that are scored or pooled; it has one decode step."""
        inputs = upload_step(step, self._table, self._page_size, self._device)
        num_scored = sum(len(row.targets) for row in step.scored)
        num_pooled = sum(row.end - row.start for row in step.pooled)
        counts = [num_scored, num_pooled, len(step.sampling)]
        scored, pooled, sampling = self._hidden(step, inputs).split(counts)
        model, logprobs, sums = self._model, None, None
        if step.scored:
            logprobs = PromptLogprobs(self._device, model.logits, scored, step.scored)
        if step.pooled:
            sums = PooledSums(model.final, pooled, step.pooled)
        sampled = self._sample(sampling, step, inputs)
        if sampled is None:
            samples = Samples(inputs.sample_slots.unsqueeze(0))  # of no row
        else:
            samples = Samples.of([sampled])
        return replace(samples, prompts=logprobs, pooled=sums)

    def _hidden(self, step: StepRows, inputs: StepInputs) -> Tensor:
        batch = ForwardBatch(
            *inputs.tokens,
            sample_rows=inputs.sample_rows,
            backend=self._backend,
            plan=self._backend.plan(step.rows, self._table.block_table),
            logit_rows=inputs.logit_rows,
        )
        hidden: Tensor = self._model(batch)
        return hidden

    def _sample(self, hidden: Tensor, step: StepRows, inputs: StepInputs) -> Sampled | None:
        if len(step.sampling) == 0:
            return None
        sampled = self._sampler.sample(self._model.logits(hidden), step.slots, step.lengths)
        self._table.keep_last(inputs.sample_slots, sampled.tokens)
        return sampled
