"""How a request chooses its tokens, and when it is served."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest
from asyncllm.types.validate import bounds, check_fields

MAX_STOP_STRINGS = 32
#: Characters of all stop strings together: each new token's text is compared with each of them.
MAX_STOP_LENGTH = 4096
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
#: A day: the longest ``cache_ttl_s`` that any server can allow.
MAX_CACHE_TTL = 86_400

_INT32 = Meta(ge=-(2**31), lt=2**31)
Int32 = Annotated[int, _INT32]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# Requests over HTTP have fields of these types, too.
Temperature = Annotated[float, bounds(0, 100)]
TopP = Annotated[float, bounds(0, 1, "greater than 0 and at most 1", is_open=True)]
TopK = Annotated[int, bounds(-1, 2**31 - 1, "-1, 0 or positive")]
MinP = Annotated[float, bounds(0, 1)]
Penalty = Annotated[float, bounds(-2, 2)]
#: Less would make logits infinite.
RepetitionPenalty = Annotated[float, bounds(0.01, 100)]
MinTokens = Annotated[int, bounds(0, 2**31 - 1, "at least 0")]
Priority = Annotated[int, bounds(-10, 10)]
Milliseconds = Annotated[float, bounds(0, 86_400_000, "positive and at most a day", is_open=True)]
CacheTtl = Annotated[float, bounds(0, MAX_CACHE_TTL, "at least 0 and at most a day")]
_Logprobs = Annotated[int, bounds(0, MAX_LOGPROBS)]


def _help(text: str) -> Meta:
    """Makes a field an option of the commands that generate."""
    return Meta(description=text)


class Reasoning(msgspec.Struct, frozen=True):
    """The reasoning with which an output may begin, before the part that a grammar applies to.

    Attributes:
        start_ids: any of these tokens begins it, as the first token of the output.
        end_ids: any of these tokens ends it.
        start_texts, end_texts: markers of several tokens that do the same. Before a grammar only
            ``start_ids`` begin it.
        is_open: the prompt has begun it already.
        max_tokens: if it has not ended within this many tokens, markers included, ``closing_ids``
            follow; None is off.
        closing_ids: the tokens of the marker that ends it then; by default the first of
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
        check_fields(self, "reasoning")


class LogitParams(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of ``SamplingParams`` that reach the sampler as they are."""

    temperature: Annotated[Temperature, _help("randomness; 0 always takes the likeliest token")] = (
        1.0
    )
    top_p: Annotated[
        TopP,
        _help("sample from the likeliest tokens that together have this probability; 1 is off"),
    ] = 1.0
    top_k: Annotated[
        TopK, _INT32, _help("sample from this many of the likeliest tokens; 0 is off")
    ] = 0
    min_p: Annotated[
        MinP,
        _help(
            "drop tokens whose probability is below this share of the likeliest token's; 0 is off"
        ),
    ] = 0.0
    presence_penalty: Annotated[
        Penalty, _help("make tokens less likely that were already generated, -2 to 2; 0 is off")
    ] = 0.0
    frequency_penalty: Annotated[
        Penalty, _help("as --presence-penalty, once for each time a token was used; 0 is off")
    ] = 0.0
    repetition_penalty: Annotated[
        RepetitionPenalty, _help("above 1, make tokens of prompt and answer less likely; 1 is off")
    ] = 1.0


class SamplingParams(LogitParams, frozen=True, kw_only=True):
    """How to choose tokens and when to stop.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches ``top_p``; 1 is off.
        top_k: keep the ``top_k`` most likely tokens; 0 or -1 is off.
        min_p: drop tokens less likely than ``min_p`` times the likeliest; 0 is off.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens, -2 to 2.
        repetition_penalty: Hugging Face's, over prompt and generated tokens; 1 is off.
        logit_bias: added to the logits of single tokens, by id; -100 to 100.
        allowed_token_ids: the only tokens that may be sampled; None is off. An end-of-sequence
            token that is not among them cannot be sampled either.
        bad_words: words that are not to be generated, each with and without a space before it, or
            the token ids of one. A word that begins in the prompt, or that the model writes with
            other tokens than the tokenizer does, is not noticed.
        prediction: a text that the output is expected to repeat in large parts, such as a file to
            be edited. Where it does, several tokens come in one step; the output is the same.
        grammar: a ``GrammarSpec`` of ``asyncllm.text.grammar`` that the output matches. It decides
            where the output may end, so ``ignore_eos`` does nothing, and ``min_tokens`` is ignored
            where only the end is allowed.
        reasoning: may come before the grammar.
        max_tokens: most tokens to generate; 0 only scores the prompt. With None a chat may fill the
            context, and an answer to raw text or token ids ends after 256 tokens, with
            ``finish_reason`` "length".
        min_tokens: no stop token and no end of a stop string comes before this many tokens.
        stop: strings that end the text (they are not part of it); a single one may stand alone.
        stop_token_ids: further token ids that end the sequence.
        ignore_eos: do not stop at the model's own end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_tokens: ids of special tokens that stay in it all the same.
        seed: makes sampling repeatable, whatever else runs at the same time.
        logprobs: None for none; n for those of the sampled token and the n likeliest tokens.
        prompt_logprobs: the same for each token of the prompt but the first. The prompt is computed
            even where it is cached.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    logit_bias: dict[Int32, float] | None = None
    allowed_token_ids: tuple[Int32, ...] | None = None
    bad_words: tuple[str | tuple[Int32, ...], ...] = ()
    prediction: str | None = None
    grammar: Any = None
    reasoning: Reasoning | None = None
    max_tokens: Annotated[
        Int32 | None,
        bounds(0, 2**31 - 1, "at least 0"),
        _help("most tokens to generate; by default 256, in chats as many as fit the context"),
    ] = None
    min_tokens: Annotated[MinTokens, _INT32] = 0
    stop: Annotated[tuple[str, ...], _help("text that ends the answer; may be repeated")] = ()
    stop_token_ids: tuple[Int32, ...] = ()
    ignore_eos: Annotated[bool, _help("do not stop at the model's end-of-sequence tokens")] = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[Int32, ...] = ()
    seed: Annotated[Int64 | None, _help("number that makes sampling repeatable")] = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: _Logprobs | None = None

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            msgspec.structs.force_setattr(self, "stop", (stop,))
        check_fields(self)
        self._check_constraints()
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
        # ``prepare``, which knows the model, checks that the ids exist.
        _check(self.allowed_token_ids != (), "allowed_token_ids", "made of at least one token id")
        _check(len(words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words")
        most = MAX_BAD_WORD_LENGTH
        fine = all(w.strip() for w in words if isinstance(w, str)) and all(words)
        fine = fine and all(len(word) <= most for word in words)
        _check(fine, "bad_words", f"made of words of at most {most} characters or tokens")


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True):
    """When a request is served, and which requests it shares with.

    Attributes:
        priority: its class, -10 to 10; lower is served earlier (see ``engine/policy.py``).
        deadline_ms: milliseconds from its arrival in which it must be finished. It is refused when
            that is impossible, and dropped when they have passed.
        tenant: the ``fair`` policy gives each tenant the same share.
        cache_salt: requests share cached prefixes only with the same salt.
        cache_ttl_s: seconds for which its prefix, output included, stays in the cache after its
            end, if there is room; at most ``max_cache_ttl_s``. 0: it will not come back, and its
            own pages are the first to go. None: as all others.
        isolated: it also shares them only with isolated requests of the same tenant.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    priority: Annotated[Priority, _INT32] = 0
    deadline_ms: Milliseconds | None = None
    tenant: str = ""
    cache_salt: str = ""
    cache_ttl_s: CacheTtl | None = None
    isolated: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check(len(self.cache_salt) <= 1024, "cache_salt", "at most 1024 characters")

    @property
    def salt(self) -> bytes:
        """Equal for requests that share cached prefixes, and only for these."""
        # JSON allows lone surrogates.
        salt = self.cache_salt.encode("utf-8", "surrogatepass")
        if not self.isolated:
            return salt
        # No text in UTF-8 has the byte 0xff.
        return b"\xff%b\xff%b" % (self.tenant.encode("utf-8", "surrogatepass"), salt)


def _check(ok: bool, param: str, expected: str) -> None:
    if not ok:
        raise BadRequest(f"{param} must be {expected}", param=param)
