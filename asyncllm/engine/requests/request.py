"""Request: one sequence, its output, and what is wanted of its prompt."""

from __future__ import annotations

import asyncio
from collections import abc
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np

from asyncllm.engine.pooling import PooledHidden
from asyncllm.engine.requests.stream import OutputStream
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.types import PromptLogprob, TokenDelta
from asyncllm.wire.messages import ScoredPrompt


class PromptScores(abc.Sequence[PromptLogprob | None]):
    """One entry per prompt token, None for the first.

    Entries are made when they are looked at: for a long prompt they are hundreds of thousands of
    objects, which would block the event loop.
    """

    def __init__(self, prompt: tuple[int, ...], num_top: int):
        self._prompt = prompt
        shape = (len(prompt) - 1, 1 + num_top)
        self._logprobs = np.zeros(shape, dtype=np.float32)
        self._ids = np.zeros(shape, dtype=np.int32)

    def add(self, part: ScoredPrompt) -> bool:
        """Take in the part of one row; returns whether that was the last.

        After a preemption, positions may come again.
        """
        rows = slice(part.start - 1, part.end - 1)
        count = part.end - part.start
        if count:
            logprobs = np.frombuffer(part.logprobs, dtype="<f4").reshape(count, -1)
            # A vocabulary smaller than the number of alternatives has fewer columns.
            columns = logprobs.shape[1]
            if columns < self._logprobs.shape[1]:
                self._logprobs = self._logprobs[:, :columns]
                self._ids = self._ids[:, :columns]
            self._logprobs[rows] = logprobs
            self._ids[rows] = np.frombuffer(part.ids, dtype="<i4").reshape(count, -1)
        return part.end == len(self._prompt)

    def delta(self) -> TokenDelta:
        """What to deliver, once all is there."""
        return TokenDelta(prompt_logprobs=self)

    def __len__(self) -> int:
        return len(self._prompt)

    @overload
    def __getitem__(self, index: int) -> PromptLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptLogprob | None]: ...
    def __getitem__(self, index: int | slice) -> PromptLogprob | list[PromptLogprob | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position == 0:
            return None
        logprob, *values = self._logprobs[position - 1].tolist()
        rank, *likeliest = self._ids[position - 1].tolist()
        top = tuple(zip(likeliest, values, strict=True))
        return PromptLogprob(self._prompt[position], logprob, top, rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, abc.Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class PromptReader(Protocol):
    """Puts together what the device computes of a prompt, chunk by chunk."""

    def add(self, part: Any) -> bool:
        """Take in the part of one row; returns whether that was the last."""

    def delta(self) -> TokenDelta:
        """What to deliver, once all is there."""


def reader_of(seq: Sequence) -> PromptReader | None:
    """For a new sequence; None when nothing is wanted of its prompt."""
    if seq.reads.pool_from >= 0:
        return PooledHidden(seq.num_prompt)
    return PromptScores(tuple(seq.tokens), seq.reads.logprobs) if seq.reads.pending else None


@dataclass(slots=True)
class Request:
    """One sequence and its output.

    Attributes:
        is_part: it is part of another request, which is counted instead.
        reader: of its prompt, until the result is delivered; None when nothing is wanted.
        expiry: the timer of its deadline.
    """

    sequence: Sequence
    stream: OutputStream
    is_part: bool
    reader: PromptReader | None = None
    expiry: asyncio.TimerHandle | None = None
