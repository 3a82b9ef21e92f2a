"""What a request may want of its prompt: its logprobs, or its hidden state."""

from __future__ import annotations

from typing import Any, Protocol

from asyncllm.engine.pooling import PooledHidden
from asyncllm.engine.requests.prompt_scores import PromptScores
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.types import TokenDelta


class PromptReader(Protocol):
    """Puts together what the device computes of a prompt, chunk by chunk."""

    def add(self, part: Any) -> bool:
        """Take in the part of one row; returns whether that was the last."""

    def delta(self) -> TokenDelta:
        """What to deliver, once all is there."""


def reader_of(seq: Sequence) -> PromptReader | None:
    """For a new sequence; None when nothing is wanted of its prompt."""
    if seq.pool_from >= 0:
        return PooledHidden(seq.num_prompt)
    return PromptScores(tuple(seq.tokens), seq.prompt_logprobs) if seq.reading else None
