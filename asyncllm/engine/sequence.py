"""Sequence: one prompt and what has been generated for it, as the scheduler sees it."""

from __future__ import annotations

import enum

from asyncllm.types import SamplingParams
from asyncllm.wire.messages import RowParams


class SeqState(enum.Enum):
    """WAITING (also after a preemption, tokens kept) -> RUNNING -> FINISHED."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """Everything the scheduler knows of a request; owned by the scheduler, on the loop.

    Three counters tell where it stands. Positions ``0 .. num_computed-1`` are computed or being
    computed by a step in flight; ``num_known`` tokens were known when it took its slot, and are
    prefilled in chunks; every later position is a decode row. ``num_sampling`` tokens are being
    sampled by steps in flight, so the sequence is ``len(tokens) + num_sampling`` long.

    Attributes:
        tokens: prompt and output so far; only grows.
        max_length: the sequence ends when it holds so many tokens.
        num_inflight: steps in flight with a row of this sequence. While it is not 0, its slot and
            pages stay its own, whatever its state.
        slot, pages: where its state lives on the device; slot is -1 without one.
    """

    __slots__ = (
        "id",
        "max_length",
        "min_length",
        "num_computed",
        "num_inflight",
        "num_known",
        "num_prompt",
        "num_sampling",
        "pages",
        "row_params",
        "slot",
        "state",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        id: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        max_length: int,
        eos_ids: tuple[int, ...],
        seed: int,
    ):
        self.id = id
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.max_length = max_length
        self.min_length = len(prompt) + params.min_tokens
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_ids)
        )
        self.row_params = RowParams(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=seed,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            min_length=self.min_length,
            stop_ids=tuple(sorted(self.stop_ids)),
        )
        self.state = SeqState.WAITING
        self.slot = -1
        self.pages: list[int] = []
        self.num_known = 0
        self.num_computed = 0
        self.num_sampling = 0
        self.num_inflight = 0
