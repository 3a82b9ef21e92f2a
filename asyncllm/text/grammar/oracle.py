"""Asks the grammar library about regular languages, so that answers agree with its grammars."""

from __future__ import annotations

from functools import lru_cache

import llguidance
import numpy as np

from asyncllm.errors import BadRequest

#: The beginning of every message about a grammar that costs too much.
TOO_COSTLY = "the grammar is too costly"
#: Parts of the library's messages when one of ``limits`` is exceeded.
_LIMITS_MET = ("Too many items", "items; max is", "too many", "too big", "fuel")

#: Tokens 0 to 255 are the bytes, 256 ends a text.
_NUM_TOKENS = 257


class _ByteTokens:
    """A tokenizer whose tokens are single bytes, in the form that the library reads."""

    is_tokenizer_wrapper = True  # how the library knows one
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@lru_cache(maxsize=1)
def byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(_ByteTokens(), slices=[])  # type: ignore[arg-type]


def limits() -> llguidance.LLParserLimits:
    """Bounds on compiling (20 ms) and on each mask (some 15 ms); real grammars need half of it.

    Ambiguous grammars can exceed them, as the cost of an item grows with the number of items; so
    matchers count time, too.
    """
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def is_empty(expression: str) -> bool:
    """Whether an expression of terminals in Lark matches no text.

    Raises:
        BadRequest: the expression is malformed or too complex.
    """
    matcher = _matcher(expression)
    _first_bytes(matcher)
    reason = matcher.stop_reason()
    if "TooComplex" in reason:
        raise BadRequest("the patterns of the schema are too complex together")
    return matcher.is_stopped() and not matcher.is_accepting()


@lru_cache(maxsize=256)
def ascii_in(expression: str) -> frozenset[str]:
    """The ASCII characters that an expression of one character matches.

    Raises:
        BadRequest: the expression is malformed.
    """
    return frozenset(chr(byte) for byte in _first_bytes(_matcher(expression)) if byte < 128)


def matches(expression: str, text: str) -> bool:
    """Whether an expression of terminals in Lark matches a text as a whole.

    Raises:
        BadRequest: the expression is malformed or too complex.
    """
    matcher = _matcher(expression)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def error_of(lark: str) -> str:
    """Why a grammar cannot be compiled; empty if it can."""
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    matcher = llguidance.LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limits())
    return first_line(matcher.get_error())


def _matcher(expression: str) -> llguidance.LLMatcher:
    grammar = llguidance.LLMatcher.grammar_from_lark(f"start: T\nT: {expression}\n")
    matcher = llguidance.LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise BadRequest(f"a pattern cannot be compiled: {first_line(matcher.get_error())}")
    return matcher


def _first_bytes(matcher: llguidance.LLMatcher) -> list[int]:
    """What a text may begin with; 256 for its end."""
    mask = np.zeros((_NUM_TOKENS + 31) // 32, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    found: list[int] = np.flatnonzero(
        np.unpackbits(mask.view(np.uint8), bitorder="little")
    ).tolist()
    return found


def error_text(message: str) -> str:
    """The library's error, as the author of the grammar should read it."""
    if any(limit in message for limit in _LIMITS_MET):
        return f"{TOO_COSTLY}: {first_line(message)}"
    return first_line(message)


def first_line(message: str) -> str:
    """The first line of a message; the library adds excerpts of the grammar."""
    line = (message.strip().splitlines() or [""])[0][:300]
    return "it is too large" if line.startswith("panic") else line
