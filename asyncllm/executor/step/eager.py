"""Steps whose kernels are launched one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import AttentionBackend, ForwardBatch
from asyncllm.executor.device import Device
from asyncllm.executor.sampling.logprobs import Logprobs
from asyncllm.executor.sampling.sampler import Sampled, Sampler
from asyncllm.executor.step.drafter import Taken, run_model
from asyncllm.executor.step.inputs import PooledRow, ScoredRow, StepInputs, StepRows, upload_step
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.kernels.scores import best_scores, log_sums
from asyncllm.models.base import CausalLM
from asyncllm.wire.messages import PooledPrompt, ScoredPrompt

#: Positions whose logits are computed at once. A whole chunk's logits would take gigabytes, and
#: each group reads the output projection again.
_GROUP = 64
_COMPUTED = (torch.float32, torch.float16, torch.bfloat16)


class PromptLogprobs:
    """Logprobs of the prompt tokens that a step's positions predict, from unchanged logits.

    Args:
        logits: from hidden states [m, hidden] to scores [m, vocab].
        hidden: [n, hidden] of the positions that predict, row after row.

    Attributes:
        packed: float64 [n, 2 + 2k] on the device, one tensor so that it is one copy: the token's
            logprob and rank, the k largest logprobs, and their token ids.
    """

    def __init__(
        self,
        device: Device,
        logits: Callable[[Tensor], Tensor],
        hidden: Tensor,
        rows: tuple[ScoredRow, ...],
    ):
        self._rows = rows
        depth = max(row.num_top for row in rows)
        self.packed = hidden.new_empty((0, 2 + 2 * depth), dtype=torch.float64)
        if len(hidden) == 0:
            return
        targets = device.upload(np.concatenate([row.targets for row in rows], dtype=np.int64))
        groups = zip(hidden.split(_GROUP), targets.split(_GROUP), strict=True)
        self.packed = torch.cat([_pack(logits(part), tokens, depth) for part, tokens in groups])

    def unpack(self, packed: np.ndarray) -> Iterator[ScoredPrompt]:
        """The rows' logprobs as messages, from a copy of ``packed`` on the host."""
        depth = packed.shape[1] // 2 - 1
        own, values, ids = np.split(packed, [2, 2 + depth], axis=1)
        logprobs = np.concatenate([own[:, :1], values], axis=1, dtype="<f4", casting="same_kind")
        numbers = np.concatenate([own[:, 1:], ids], axis=1).astype("<i4")
        first = 0
        for row in self._rows:
            end = first + len(row.targets)
            columns = slice(1 + row.num_top)
            yield ScoredPrompt(
                row=row.row,
                start=row.start,
                end=row.start + len(row.targets),
                logprobs=logprobs[first:end, columns].tobytes(),
                ids=numbers[first:end, columns].tobytes(),
            )
            first = end


def _pack(logits: Tensor, tokens: Tensor, depth: int) -> Tensor:
    """``PromptLogprobs.packed`` of m positions, whose scored tokens are int64 [m]."""
    scores = logits.float()
    own = scores.gather(1, tokens.unsqueeze(1))
    rank = (scores > own).sum(dim=1, keepdim=True) + 1
    best, ids = best_scores(scores, min(depth, scores.shape[1]))
    values = torch.cat([own, best], dim=1) - log_sums(scores)
    parts = [values[:, :1].double(), rank.double(), values[:, 1:].double(), ids.double()]
    return torch.cat(parts, dim=1)


class PooledSums:
    """The sum of each pooled row's hidden states.

    Args:
        final: the model's last norm.
        hidden: [n, hidden_size] of the pooled positions, row after row.

    Attributes:
        packed: float32 [rows, hidden_size] on the device.
    """

    def __init__(
        self, final: Callable[[Tensor], Tensor], hidden: Tensor, rows: tuple[PooledRow, ...]
    ):
        self._rows = rows
        states = final(hidden)
        if len(rows) == len(states):
            self.packed = states.float()
        else:
            parts = states.split([row.end - row.start for row in rows])
            self.packed = torch.stack([part.sum(0, dtype=torch.float32) for part in parts])

    def unpack(self, packed: np.ndarray) -> Iterator[PooledPrompt]:
        """The sums as messages, from a copy of ``packed`` on the host."""
        for row, total in zip(self._rows, packed.astype("<f4", copy=False), strict=True):
            yield PooledPrompt(row.row, row.start, row.end, total.tobytes())


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
        taken: what a head that drafts takes from the step; None without a head.
    """

    tokens: Tensor
    logprobs: tuple[Logprobs | None, ...] = ()
    prompts: PromptLogprobs | None = None
    pooled: PooledSums | None = None
    failures: tuple[tuple[int, int, str], ...] = ()
    columns: np.ndarray | None = None
    taken: Taken | None = None

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


def _samples(sampled: Sampled | None, inputs: StepInputs) -> Samples:
    """Of one step, of which maybe no row samples."""
    return Samples(inputs.sample_slots.unsqueeze(0)) if sampled is None else Samples.of([sampled])


@dataclass(frozen=True, slots=True)
class EagerForward:
    """``StepForward`` for any rows on any device."""

    model: CausalLM
    backend: AttentionBackend
    states: StatePool
    sampler: Sampler
    table: SlotTable
    page_size: int
    device: Device

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        return next(p.dtype for p in self.model.parameters() if p.dtype in _COMPUTED)

    def __call__(self, step: StepRows, decode_steps: int = 1) -> Samples | None:
        step = step.settled(self.table)
        if step.reads_prompts:
            return self._run_reading_prompts(step)
        if self.model.head is not None or self.states.num_scratch:
            assert decode_steps == 1, "each token is followed"
            return self._run_taking(step)
        sampled = [self._run(step.continued(after)) for after in range(decode_steps)]
        done = [part for part in sampled if part is not None]
        return Samples.of(done) if done else None

    def _run(self, step: StepRows) -> Sampled | None:
        inputs = upload_step(step, self.table, self.page_size, self.device)
        return self._sample(self._hidden(step, inputs)[0], step, inputs)

    def _run_taking(self, step: StepRows) -> Samples:
        inputs = upload_step(step, self.table, self.page_size, self.device)
        hidden, taken = self._hidden(step, inputs)
        sampled = self._sample(hidden, step, inputs)
        return replace(_samples(sampled, inputs), taken=taken)

    def _run_reading_prompts(self, step: StepRows) -> Samples:
        """A step with prompts that are scored or pooled; it has one decode step."""
        inputs = upload_step(step, self.table, self.page_size, self.device)
        num_scored = sum(len(row.targets) for row in step.scored)
        num_pooled = sum(row.end - row.start for row in step.pooled)
        counts = [num_scored, num_pooled, len(step.sampling)]
        hidden, taken = self._hidden(step, inputs)
        scored, pooled, sampling = hidden.split(counts)
        model, logprobs, sums = self.model, None, None
        if step.scored:
            logprobs = PromptLogprobs(self.device, model.logits, scored, step.scored)
        if step.pooled:
            sums = PooledSums(model.final, pooled, step.pooled)
        samples = _samples(self._sample(sampling, step, inputs), inputs)
        return replace(samples, prompts=logprobs, pooled=sums, taken=taken)

    def _hidden(self, step: StepRows, inputs: StepInputs) -> tuple[Tensor, Taken | None]:
        batch = ForwardBatch(
            *inputs.tokens,
            sample_rows=inputs.sample_rows,
            backend=self.backend,
            plan=self.backend.plan(step.rows, self.table.block_table),
            logit_rows=inputs.logit_rows,
            states=self.states.of_step(step.rows, step.state_slots, self.device.upload),
        )
        wanted = self.states.num_scratch > 0 and step.drafts is not None
        return run_model(self.model, batch, replays=wanted)

    def _sample(self, hidden: Tensor, step: StepRows, inputs: StepInputs) -> Sampled | None:
        if len(step.sampling) == 0:
            return None
        sampled = self.sampler.sample(
            self.model.logits(hidden), step.slots, step.lengths, step.drafts
        )
        self.table.keep_last(inputs.sample_slots, sampled.tokens)
        return sampled
