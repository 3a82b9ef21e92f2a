"""Pooled hidden states of one prompt: the parameters, and the sum over its chunks."""

from __future__ import annotations

import numpy as np

from asyncllm.types import Int32, Pooling, SamplingParams, TokenDelta
from asyncllm.wire.messages import PooledPrompt


class PooledParams(SamplingParams, frozen=True, kw_only=True):
    """Parameters of a request that generates nothing; its first delta has the ``hidden`` state."""

    pooling: Pooling = "last"
    max_tokens: Int32 | None = 0
    temperature: float = 0.0

    def first_wanted(self, num_prompt: int) -> int:
        """The first prompt position whose hidden state is part of the vector."""
        return 0 if self.pooling == "mean" else num_prompt - 1


class PooledHidden:
    """The mean of the wanted hidden states. Each position comes once, even after a preemption."""

    def __init__(self, num_prompt: int):
        self._num_prompt = num_prompt
        self._sum: np.ndarray | None = None
        self._count = 0

    def add(self, part: PooledPrompt) -> bool:
        """Take in the part of one row; returns whether that was the last."""
        total = np.frombuffer(part.total, dtype="<f4").astype(np.float64)
        self._sum = total if self._sum is None else self._sum + total
        self._count += part.end - part.start
        return part.end == self._num_prompt

    def delta(self) -> TokenDelta:
        """What to deliver, once all is there."""
        assert self._sum is not None, "a row has a position at least"
        return TokenDelta(hidden=(self._sum / self._count).astype("<f4").tobytes())
