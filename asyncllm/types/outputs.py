"""Prompts, and what the engine delivers for them, and where to."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

import msgspec

from asyncllm.errors import BadRequest


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probabilities at one position, before temperature and filters.

    ``top`` lists (token id, logprob) of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(TokenLogprob, frozen=True):
    """A token of the prompt, with its logprob; ``rank`` is 1 for the likeliest token."""

    rank: int = 1


class TokenDelta(msgspec.Struct):
    """What one step (or several merged ones) added to one sequence.

    Attributes:
        text: may be empty while a character or a possible stop string is incomplete.
        logprobs: one entry per token id; None if not wanted.
        finish_reason: set on the last delta only.
        stop_reason: the stop string or the stop token id that ended the sequence; None for the
            model's own end-of-sequence token.
        cached_tokens: on the last delta, the tokens of the prompt whose KV was cached.
        prompt_logprobs: if wanted, in the first delta, with or before the first token: one entry
            per prompt token, None for the first. They are unpacked each time they are looked at.
        predicted: on the last delta, how many drafted tokens of the request's prediction were
            right, and how many were wrong.
        hidden: float32 [hidden_size]; if wanted, the prompt's pooled hidden state
            (``engine/pooling.py``).
    """

    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    prompt_logprobs: Sequence[PromptLogprob | None] | None = None
    predicted: tuple[int, int] = (0, 0)
    hidden: bytes | None = None

    def merge(self, later: TokenDelta) -> None:
        """Append a later delta of the same sequence to this one, in place."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += later.logprobs
        if later.finish_reason is not None:
            self.finish_reason = later.finish_reason
            self.stop_reason = later.stop_reason
            self.cached_tokens = later.cached_tokens
            self.predicted = later.predicted
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        if later.hidden is not None:
            self.hidden = later.hidden


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one or more sequences; ``cached_tokens`` of the prompt were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Completion(msgspec.Struct):
    """The whole answer to one prompt, as ``generate()`` returns it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[TokenLogprob] | None
    usage: Usage
    prompt_logprobs: Sequence[PromptLogprob | None] | None = None


class Sink(Protocol):
    """Where the engine delivers one sequence's output, on the event loop.

    Both calls must return at once and never raise: they run between two steps of all requests.
    After a delta with a ``finish_reason``, or after ``fail``, nothing more is delivered.
    """

    def emit(self, delta: TokenDelta) -> None: ...
    def fail(self, error: Exception) -> None: ...


#: A prompt as callers may give it: text, token ids, or chat messages.
Prompt: TypeAlias = str | Sequence[int] | Sequence[dict[str, Any]]


def plain_prompt(prompt: Prompt) -> str | list[int] | list[dict[str, Any]]:
    """A prompt as plain text, token ids or messages; arrays and tensors become lists.

    Raises:
        BadRequest: it is none of the three.
    """
    if isinstance(prompt, str):
        return prompt
    tolist = getattr(prompt, "tolist", None)
    items: Any = tolist() if tolist else list(prompt) if _is_list(prompt) else None
    if not isinstance(items, list):
        raise _no_prompt(type(prompt).__name__)
    types = set(map(type, items))  # in C: a prompt can be long
    for kind in (int, dict):
        if all(issubclass(found, kind) for found in types):
            return items
    raise _no_prompt(f"a list of {', '.join(sorted(found.__name__ for found in types))}")


def is_single(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    """Whether it is one prompt, not a list of prompts. An array of numbers is one prompt.

    Raises:
        BadRequest: it is neither.
    """
    if isinstance(prompts, str):
        return True
    if not _is_list(prompts):
        raise _no_prompt(type(prompts).__name__)
    first = next(iter(prompts), None)
    is_number = isinstance(first, int) or getattr(first, "ndim", None) == 0
    return isinstance(first, dict) or (is_number and not isinstance(first, str))


def is_conversation(prompt: Prompt) -> TypeGuard[Sequence[dict[str, Any]]]:
    """Whether a prompt is chat messages."""
    return not isinstance(prompt, str) and isinstance(next(iter(prompt), None), dict)


def is_chat(prompt: str | list[int] | list[dict[str, Any]]) -> TypeGuard[list[dict[str, Any]]]:
    """Whether a plain prompt is chat messages."""
    return is_conversation(prompt)


def _is_list(value: object) -> bool:
    """Whether it is a list, a tuple, an array or the like; bytes are neither text nor token ids."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return False
    return isinstance(value, Sequence) or hasattr(value, "tolist")


def _no_prompt(given: str) -> BadRequest:
    return BadRequest(
        f"a prompt is text, a list of token ids, or a list of chat messages, not {given}",
        param="prompt",
    )
