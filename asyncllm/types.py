"""The words every layer shares: what is asked (SamplingParams) and what comes back."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeAlias, TypeGuard

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest
from asyncllm.validate import check_types

MAX_STOP_STRINGS = 32
MAX_LOGPROBS = 20

Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

#: What a caller may hand in as a prompt: text, token ids, or chat messages.
Prompt: TypeAlias = str | Sequence[int] | Sequence[dict[str, Any]]


def plain_prompt(prompt: Prompt) -> str | list[int] | list[dict[str, Any]]:
    """A prompt as the text, token ids or messages that it is; arrays and tensors become lists.

    Raises:
        BadRequest: it is none of the three.
    """
    if isinstance(prompt, str):
        return prompt
    tolist = getattr(prompt, "tolist", None)
    items: list[Any] = list(prompt) if tolist is None else tolist()
    types = set(map(type, items))  # in C: a prompt can be long
    for kind in (int, dict):
        if all(issubclass(found, kind) for found in types):
            return items
    raise BadRequest(
        "a prompt is text, a list of token ids, or a list of chat messages", param="prompt"
    )


def is_chat(prompt: str | list[int] | list[dict[str, Any]]) -> TypeGuard[list[dict[str, Any]]]:
    """Whether a plain prompt is chat messages."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches ``top_p``; 1 is off.
        top_k: keep the ``top_k`` most likely tokens; 0 or -1 is off.
        min_p: drop tokens less likely than ``min_p`` times the likeliest; 0 is off.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens, -2 to 2.
        repetition_penalty: Hugging Face's, over prompt and generated tokens; 1 is off.
        max_tokens: most tokens to generate; None means all the room left in the context.
        min_tokens: no stop token before so many tokens.
        stop: strings that end the text (they are not part of it); a single one may stand alone.
        stop_token_ids: further token ids that end the sequence.
        ignore_eos: do not stop at the model's own end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        seed: makes sampling repeatable, whatever else runs beside it.
        logprobs: None for none; n for the sampled token's and the n likeliest tokens'.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int32 = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: Int32 | None = None
    min_tokens: Int32 = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Int32, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: Int64 | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            msgspec.structs.force_setattr(self, "stop", (stop,))
        check_types(self)
        _check(0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        _check(0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1")
        _check(self.top_k >= -1, "top_k", "-1, 0 or positive")
        _check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        _check(0 < self.repetition_penalty <= 100, "repetition_penalty", "between 0 and 100")
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        _check(self.min_tokens >= 0, "min_tokens", "at least 0")
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "at most max_tokens",
        )
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        _check(all(self.stop), "stop", "made of non-empty strings")
        _check(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "made of token ids")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"between 0 and {MAX_LOGPROBS}",
        )


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True):
    """When a request is served, and with whom it shares.

    Attributes:
        priority: its class, -10 to 10; lower is served earlier (see ``engine/policy.py``).
        deadline_ms: milliseconds from its arrival in which it must be finished. It is refused when
            that cannot be, and dropped when they have passed.
        tenant: who asks; the ``fair`` policy gives each tenant the same share.
        cache_salt: requests share cached prefixes only with those of the same salt.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    priority: Int32 = 0
    deadline_ms: float | None = None
    tenant: str = ""
    cache_salt: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        _check(-10 <= self.priority <= 10, "priority", "between -10 and 10")
        _check(
            self.deadline_ms is None or 0 < self.deadline_ms <= 86_400_000,
            "deadline_ms",
            "positive and at most a day",
        )
        _check(len(self.cache_salt) <= 1024, "cache_salt", "at most 1024 characters")


def _check(ok: bool, param: str, expected: str) -> None:
    if not ok:
        raise BadRequest(f"{param} must be {expected}", param=param)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probabilities at one position, before temperature and filters.

    ``top`` lists (token id, logprob) of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenDelta(msgspec.Struct):
    """What one step (or several merged ones) added to one sequence.

    ``text`` may be empty while a character or a possible stop string is incomplete.
    ``finish_reason`` is set on the last delta only; ``stop_reason`` then is the stop string or the
    stop token id that ended the sequence (None for the model's own end-of-sequence token).
    ``logprobs`` has one entry per token id when they were asked for. ``cached_tokens``, set on the
    last delta, is how many tokens of the prompt were not computed, as their KV was cached.
    """

    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0

    def merge(self, later: TokenDelta) -> None:
        """Append a later delta of the same sequence to this one, in place."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.cached_tokens = later.cached_tokens


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


class Sink(Protocol):
    """Where the engine delivers one sequence's output, on the event loop.

    Both calls must return at once and never raise: one engine task serves every request. After a
    delta with a ``finish_reason``, or after ``fail``, nothing more is delivered.
    """

    def emit(self, delta: TokenDelta) -> None: ...

    def fail(self, error: Exception) -> None: ...
