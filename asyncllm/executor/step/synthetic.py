"""Synthetic acceptance: in benchmarks of random weights, chance decides which drafts are right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from asyncllm.executor.device import Device
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.eager import Samples, StepForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.slots import SlotTable
from asyncllm.kernels.random_streams import stream_of, uniforms
from asyncllm.wire.messages import NO_TOKEN, UNKNOWN_DRAFT


class SyntheticAcceptance:
    """A ``StepForward`` that samples what was drafted with a given probability, else another token.

    The step before has computed the same rows with the same kernels as any step, and what comes
    after compares samples with drafts as always. So a row takes the time that it takes with real
    drafts, and a few small kernels more. Whether a draft is right depends on the seed of its
    request and its position alone. What the host drafted before it knew that earlier drafts were
    wrong is wrong, too.

    Args:
        rate: how probable it is that a drafted token is right if those before are.
    """

    def __init__(
        self, forward: StepForward, rate: float, sampler: Sampler, table: SlotTable, device: Device
    ):
        self._forward = forward
        self._rate = rate
        self._sampler = sampler
        self._table = table
        self._device = device

    def __call__(self, step: StepRows, decode_steps: int = 1) -> Samples | None:
        samples = self._forward(step, decode_steps)
        if samples is None or step.drafts is None:
            return samples
        num_samples = len(step.sampling)
        where = np.arange(num_samples) if samples.columns is None else samples.columns
        meant = step.rows[:, 1].astype(np.int64)
        if step.meant_behind is not None:
            meant -= step.meant_behind
        meant = meant[step.sampling]
        host = np.stack([where, step.slots, step.lengths, step.drafts, step.places, meant])
        columns, slots, positions, drafted, places, starts = self._device.upload(host).unbind()
        sampled = samples.tokens[0, columns]
        # Not the streams of the samples themselves.
        chances = uniforms(stream_of(self._sampler.streams[slots]), positions)
        right = (chances < self._rate) & (drafted != NO_TOKEN)
        if step.most_behind is not None:
            follows = self._device.upload(step.most_behind[step.sampling] > 0)
            misled = follows & (self._table.next_position[slots] != starts)
            right &= ~misled | (drafted == UNKNOWN_DRAFT)
        places = places.clamp(max=self._table.drafted.shape[1] - 1)
        drafted = torch.where(drafted == UNKNOWN_DRAFT, self._table.drafted[slots, places], drafted)
        # Rows that are sampled one after the other have ended at the first difference.
        useless = (sampled == drafted) | (sampled == NO_TOKEN)
        other = torch.where(useless, (drafted == 0).long(), sampled)
        chosen = torch.where(right, drafted, other)
        tokens = samples.tokens.index_copy(1, columns, chosen.unsqueeze(0))
        return replace(samples, tokens=tokens)
