"""The words every layer shares: what is asked (SamplingParams) and what comes back."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeGuard

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest
from asyncllm.validate import check_types

MAX_STOP_STRINGS = 32
#: Characters of all stop strings together: each new token's text is held against each of them.
MAX_STOP_LENGTH = 4096
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256

Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

#: Which final hidden states make the vector of a prompt: its last token's, or the mean of all.
Pooling: TypeAlias = Literal["last", "mean"]

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
    items: Any = tolist() if tolist else list(prompt) if _is_list(prompt) else None
    if not isinstance(items, list):
        raise _no_prompt(type(prompt).__name__)
    types = set(map(type, items))  # in C: a prompt can be long
    for kind in (int, dict):
        if all(issubclass(found, kind) for found in types):
            return items
    raise _no_prompt(f"a list of {', '.join(sorted(found.__name__ for found in types))}")


def is_single(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    """Whether it is one prompt, and not a list of them. An array of numbers is one prompt.

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


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Reasoning(msgspec.Struct, frozen=True):
    """How an output may begin with reasoning, which its grammar is not about.

    Attributes:
        start_ids: tokens each of which begins it, as the first token of the output.
        end_ids: tokens each of which ends it.
        start_texts, end_texts: markers of several tokens that do the same. Before a grammar only
            ``start_ids`` begin it.
        is_open: the prompt has begun it already.
        max_tokens: so many tokens of the output, markers included, are followed by ``closing_ids``
            if its end has not come before; None is off.
        closing_ids: the marker that ends it when it must, token by token; by default the first of
            ``end_ids``.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    start_ids: tuple[Int32, ...] = ()
    end_ids: tuple[Int32, ...] = ()
    is_open: bool = False
    max_tokens: Int32 | None = None
    start_texts: tuple[str, ...] = ()
    end_texts: tuple[str, ...] = ()
    closing_ids: tuple[Int32, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "reasoning")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches ``top_p``; 1 is off.
        top_k: keep the ``top_k`` most likely tokens; 0 or -1 is off.
        min_p: drop tokens less likely than ``min_p`` times the likeliest; 0 is off.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens, -2 to 2.
        repetition_penalty: Hugging Face's, over prompt and generated tokens; 1 is off.
        logit_bias: what is added to the logits of single tokens, by id; -100 to 100.
        allowed_token_ids: the only tokens that may be sampled; None is off. An end-of-sequence
            token that is not among them cannot be sampled either.
        bad_words: what may not be generated: words, each with and without a space before it, or
            the token ids of one. A word that is made of other tokens than the tokenizer makes of
            it, or that begins in the prompt, is not noticed.
        grammar: what the output must be, a ``GrammarSpec`` of ``asyncllm.text.grammar``. It decides
            where the output may end, so ``ignore_eos`` does nothing; ``min_tokens`` yields where
            only the end is left.
        reasoning: what may come before the grammar begins, and how much of it.
        max_tokens: most tokens to generate; 0 only scores the prompt. With None a chat may fill the
            context, and an answer to raw text or token ids ends after 256 tokens, with
            ``finish_reason`` "length".
        min_tokens: neither a stop token nor the end of a stop string among so many tokens.
        stop: strings that end the text (they are not part of it); a single one may stand alone.
        stop_token_ids: further token ids that end the sequence.
        ignore_eos: do not stop at the model's own end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_tokens: ids of those that stay in it all the same.
        seed: makes sampling repeatable, whatever else runs beside it.
        logprobs: None for none; n for the sampled token's and the n likeliest tokens'.
        prompt_logprobs: the same for each token of the prompt but the first. Such a prompt is
            computed even where it is cached.

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
    logit_bias: dict[Int32, float] | None = None
    allowed_token_ids: tuple[Int32, ...] | None = None
    bad_words: tuple[str | tuple[Int32, ...], ...] = ()
    grammar: Any = None
    reasoning: Reasoning | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Int32, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[Int32, ...] = ()
    seed: Int64 | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

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
        # Less would make logits infinite.
        _check(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "between 0.01 and 100")
        self._check_constraints()
        _check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0")
        _check(self.min_tokens >= 0, "min_tokens", "at least 0")
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "at most max_tokens",
        )
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        length = sum(map(len, self.stop))
        _check(length <= MAX_STOP_LENGTH, "stop", f"at most {MAX_STOP_LENGTH} characters in all")
        _check(all(self.stop), "stop", "made of non-empty strings")
        _check(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "made of token ids")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            ok = wanted is None or 0 <= wanted <= MAX_LOGPROBS
            _check(ok, name, f"between 0 and {MAX_LOGPROBS}")

    def _check_constraints(self) -> None:
        bias, words = self.logit_bias or {}, self.bad_words
        _check(len(bias) <= MAX_LOGIT_BIAS, "logit_bias", f"of at most {MAX_LOGIT_BIAS} tokens")
        _check(all(-100 <= b <= 100 for b in bias.values()), "logit_bias", "between -100 and 100")
        reasoning = self.reasoning
        if reasoning is not None:
            ended = reasoning.end_ids != () or reasoning.end_texts != ()
            _check(ended, "reasoning", "ended by some token or text")
            texts = reasoning.start_texts + reasoning.end_texts
            _check(all(texts), "reasoning", "begun and ended by texts that are not empty")
            most = reasoning.max_tokens
            closed = most is None or reasoning.end_ids or reasoning.closing_ids
            _check(bool(closed), "reasoning", "closed by some token to be limited")
            _check(most is None or most >= 0, "reasoning", "of at least 0 tokens")
        # Whether the ids exist is known where the model is.
        _check(self.allowed_token_ids != (), "allowed_token_ids", "made of at least one token id")
        _check(len(words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words")
        most = MAX_BAD_WORD_LENGTH
        fine = all(w.strip() for w in words if isinstance(w, str)) and all(words)
        fine = fine and all(len(word) <= most for word in words)
        _check(fine, "bad_words", f"made of words of at most {most} characters or tokens")


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True):
    """When a request is served, and with whom it shares.

    Attributes:
        priority: its class, -10 to 10; lower is served earlier (see ``engine/policy.py``).
        deadline_ms: milliseconds from its arrival in which it must be finished. It is refused when
            that cannot be, and dropped when they have passed.
        tenant: who asks; the ``fair`` policy gives each tenant the same share.
        cache_salt: requests share cached prefixes only with those of the same salt.
        isolated: and only with those of the same tenant that are isolated, too.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    priority: Int32 = 0
    deadline_ms: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    isolated: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        _check(-10 <= self.priority <= 10, "priority", "between -10 and 10")
        _check(
            self.deadline_ms is None or 0 < self.deadline_ms <= 86_400_000,
            "deadline_ms",
            "positive and at most a day",
        )
        _check(len(self.cache_salt) <= 1024, "cache_salt", "at most 1024 characters")

    @property
    def salt(self) -> bytes:
        """What prefixes are cached under: equal for those who share them, and for nobody else."""
        # JSON lets lone surrogates through.
        salt = self.cache_salt.encode("utf-8", "surrogatepass")
        if not self.isolated:
            return salt
        # No text in UTF-8 has the byte 0xff.
        return b"\xff%b\xff%b" % (self.tenant.encode("utf-8", "surrogatepass"), salt)


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


class PromptLogprob(TokenLogprob, frozen=True):
    """The same for a token of the prompt, which has so many likelier ones before it, and itself."""

    rank: int = 1


class TokenDelta(msgspec.Struct):
    """What one step (or several merged ones) added to one sequence.

    ``text`` may be empty while a character or a possible stop string is incomplete.
    ``finish_reason`` is set on the last delta only; ``stop_reason`` then is the stop string or the
    stop token id that ended the sequence (None for the model's own end-of-sequence token).
    ``logprobs`` has one entry per token id when they were asked for. ``cached_tokens``, set on the
    last delta, is how many tokens of the prompt were not computed, as their KV was cached.
    ``prompt_logprobs``, where they were asked for, are in the first delta, which comes with or
    before the first token: one entry per prompt token, None for the first. They are unpacked when
    they are looked at, each time. ``hidden``, float32 [hidden_size], is the prompt's pooled hidden
    state, where that was asked for (``engine/pooling.py``).
    """

    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    prompt_logprobs: Sequence[PromptLogprob | None] | None = None
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

    Both calls must return at once and never raise: one engine task serves every request. After a
    delta with a ``finish_reason``, or after ``fail``, nothing more is delivered.
    """

    def emit(self, delta: TokenDelta) -> None: ...

    def fail(self, error: Exception) -> None: ...
