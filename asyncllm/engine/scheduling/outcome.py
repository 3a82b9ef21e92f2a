"""What the scheduler hands to the engine: planned steps, and what finished steps mean."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.types import FinishReason
from asyncllm.wire.messages import PooledPrompt, ScoredPrompt, StepPlan

#: What a step found out about a prompt.
PromptPart: TypeAlias = ScoredPrompt | PooledPrompt


class Planned(NamedTuple):
    """A step to submit, the sequences that it admits, its tokens, and its decode rows."""

    message: StepPlan
    admitted: list[Sequence]
    num_tokens: int
    num_decodes: int


class Emitted(NamedTuple):
    """One new token of one sequence; ``row`` is its row in the step.

    A BAD_TOKEN (the row's logits were not finite, or its constraints left no token) is emitted
    once, and ends the sequence. A NO_TOKEN ends a sequence that was to generate nothing.
    """

    seq: Sequence
    row: int
    token: int
    finish: FinishReason | None


class Applied(NamedTuple):
    """The new tokens in row order, or the sequences that made a step fail, which end here.

    ``read`` is what was wanted of prompts; it is delivered before the tokens.
    """

    emitted: list[Emitted]
    failed: list[Sequence]
    read: list[tuple[Sequence, PromptPart]]
