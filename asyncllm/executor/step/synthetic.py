"""Synthetic acceptance: in benchmarks of random weights, chance decides which drafts are right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from asyncllm.executor.device import Device
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.eager import Samples, StepForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.kernels.random_streams import stream_of, uniforms
from asyncllm.wire.messages import NO_TOKEN


class SyntheticAcceptance:
    """A ``StepForward`` that samples what was drafted with a given probability, else another token.

    The step before has computed the same rows with the same kernels as any step, and what comes
    after compares samples with drafts as always. So a row takes the time that it takes with real
    drafts, and a few small kernels more. Whether a draft is right depends on the seed of its
    request and its position alone.

    Args:
        rate: how probable it is that a drafted token is right if those before are.
    """

    def __init__(self, forward: StepForward, rate: float, sampler: Sampler, device: Device):
        self._forward = forward
        self._rate = rate
        self._sampler = sampler
        self._device = device

    def __call__(self, step: StepRows, decode_steps: int = 1) -> Samples | None:
        samples = self._forward(step, decode_steps)
        if samples is None or step.drafts is None:
            return samples
        num_samples = len(step.sampling)
        where = np.arange(num_samples) if samples.columns is None else samples.columns
        host = np.stack([where, step.slots, step.lengths, step.drafts])
        columns, slots, positions, drafted = self._device.upload(host).unbind()
        sampled = samples.tokens[0, columns]
        # Not the streams of the samples themselves.
        chances = uniforms(stream_of(self._sampler.streams[slots]), positions)
        right = (chances < self._rate) & (drafted != NO_TOKEN)
        # Rows that are sampled one after the other have ended at the first difference.
        useless = (sampled == drafted) | (sampled == NO_TOKEN)
        other = torch.where(useless, (drafted == 0).long(), sampled)
        chosen = torch.where(right, drafted, other)
        tokens = samples.tokens.index_copy(1, columns, chosen.unsqueeze(0))
        return replace(samples, tokens=tokens)
