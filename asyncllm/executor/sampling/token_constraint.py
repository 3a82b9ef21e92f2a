"""Restriction: what one sequence may sample next, where that depends on what it has sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from asyncllm.text.reasoning import ReasoningSpan
from asyncllm.types import Reasoning
from asyncllm.wire.messages import Constraints, RowParams


class Matcher(Protocol):
    """Where one sequence is in its grammar.

    Nothing raises: what goes wrong is told by ``error``, and then the sequence cannot go on.
    """

    @property
    def error(self) -> str | None:
        """None, or why the sequence cannot go on."""

    @property
    def is_finished(self) -> bool:
        """Whether only the end of the sequence could follow, or it has."""

    def accept(self, token: int) -> object:
        """The sequence goes on with this token; the grammar is not finished."""

    def accept_bytes(self, text: bytes) -> object:
        """The sequence goes on with this text, which is not a token of its own."""


M = TypeVar("M", bound=Matcher)


class Grammars(Protocol[M]):
    """Makes matchers, and asks many of them at once."""

    def matcher(self, grammar: bytes) -> M:
        """At the beginning of the grammar that ``Constraints.grammar`` names; quick to make.

        Raises:
            Exception: there is no such grammar.
        """

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text."""

    def fill(self, matchers: Sequence[M], masks: np.ndarray) -> None:
        """Write which tokens each of them allows next.

        An end-of-sequence token is allowed exactly where the grammar may end.

        Args:
            masks: int32 [len(matchers), ceil(vocab / 32)], to be overwritten: bit i % 32 of word
                i // 32 becomes 1 where token i is allowed.
        """


class Restriction:
    """The state of one sequence, on the host.

    Bad words are the sequences of tokens that would be completed by their last one, as in Hugging
    Face's ``bad_words_ids``; as in vLLM only what was generated counts, not the prompt.

    Args:
        fixed: int32 [width], 0 where a token is never allowed.
        matcher: of a sequence that has a grammar.
        error: why it can never sample anything, such as a grammar that could not be made.
        token_bytes: what a token adds to the text; needed where markers of reasoning are texts.
    """

    def __init__(
        self,
        params: RowParams,
        fixed: np.ndarray,
        matcher: Matcher | None = None,
        error: str | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
    ):
        asked = params.constraints or Constraints()
        self._matcher = matcher
        self._error = error
        self._fixed = fixed
        self._has_mask = bool(asked.mask)
        self._words = _Words(asked.bad_words)
        # Without a grammar the sampler bans them itself.
        self._min_length = params.min_length if asked.grammar else 0
        self._stops = np.array(params.stop_ids, dtype=np.int64)
        self._reasoning = None
        if (reasoning := asked.reasoning) is not None:
            if asked.grammar:
                # What its first tokens are not allowed to begin they do not begin.
                reasoning = msgspec.structs.replace(reasoning, start_texts=())
            self._reasoning = _Progress(reasoning, token_bytes)

    @property
    def matching(self) -> Matcher | None:
        """What has to fill the mask before it is narrowed."""
        return None if self._reasoning is not None and self._reasoning.inside else self._matcher

    def accept(self, token: int) -> None:
        """The sequence goes on with this token; a negative one is none."""
        if token >= 0:
            self._words.accept(token)
            if self._reasoning is not None and self._reasoning.accept(token):
                # A token may end the reasoning and begin the answer; space between is markup.
                beyond = self._reasoning.beyond.lstrip()
                if beyond and self._matcher is not None:
                    self._matcher.accept_bytes(beyond)
                return
            # Rows that were in flight when it ended may have ended it again.
            if self._matcher is not None and not self._matcher.is_finished:
                self._matcher.accept(token)

    def narrow(self, mask: np.ndarray, length: int) -> str | None:
        """Clear what is not allowed in the mask of a sequence that has ``length`` tokens.

        Args:
            mask: int32 [width], as ``matching`` has filled it; overwritten where there is none.

        Returns:
            None, or what went wrong, and then nothing is allowed.
        """
        matching, reasoning = self.matching, self._reasoning
        error = self._error or (matching.error if matching is not None else None)
        if error is not None:
            mask[:] = 0
            return error
        if matching is None:
            mask[:] = self._fixed
        if reasoning is not None:
            reasoning.change(mask, self._stops if self._matcher is not None else None)
        if matching is not None and self._has_mask:
            mask &= self._fixed
        if banned := self._words.next():
            _clear(mask, np.array(banned))
        if length < self._min_length:
            later = mask.copy()
            _clear(later, self._stops)
            if later.any():
                mask[:] = later
        return None


class _Progress:
    """How far the reasoning at the beginning of an output is."""

    def __init__(self, asked: Reasoning, token_bytes: Callable[[int], bytes] | None):
        self._span = ReasoningSpan(asked)
        self._token_bytes = token_bytes if self._span.reads_text else None
        self._starts = np.array(() if asked.is_open else asked.start_ids, dtype=np.int64)
        self._closing = asked.closing_ids or asked.end_ids[:1]
        self._recent: deque[int] = deque(maxlen=len(self._closing) - 1 if self._closing else 0)
        self._most = np.inf if asked.max_tokens is None else asked.max_tokens

    @property
    def inside(self) -> bool:
        """Whether the next token is part of it."""
        return self._span.inside

    @property
    def beyond(self) -> bytes:
        """What the latest token says behind the end that it has completed."""
        return self._span.beyond

    def accept(self, token: int) -> bool:
        """Whether the token is part of it."""
        self._recent.append(token)
        text = b"" if self._token_bytes is None else self._token_bytes(token)
        return self._span.accept(token, text)

    def change(self, mask: np.ndarray, stops: np.ndarray | None) -> None:
        """Let it begin, and have it end in time; ``stops`` are for what comes after it."""
        left = self._most - self._span.length
        if self.inside:
            if stops is not None:
                _clear(mask, stops)
            if left <= 0:
                mask[:] = 0
                _set(mask, np.array([self._next_closing()]))
        elif self._span.at_start and left > 0:
            _set(mask, self._starts)

    def _next_closing(self) -> int:
        """The token that goes on with the closing marker, as far as that is there already."""
        recent = tuple(self._recent)
        return next(
            self._closing[count]
            for count in range(len(recent), -1, -1)
            if recent[len(recent) - count :] == self._closing[:count]
        )


class _Words:
    """Which tokens would complete a word of several."""

    def __init__(self, words: Iterable[tuple[int, ...]]):
        #: By how many tokens come before the last one, and which: the last ones.
        self._last: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in words:
            completing = self._last.setdefault(len(before), {})
            completing.setdefault(tuple(before), []).append(last)
        self._recent: deque[int] = deque(maxlen=max(self._last, default=0))

    def accept(self, token: int) -> None:
        self._recent.append(token)

    def next(self) -> list[int]:
        recent = tuple(self._recent)
        tokens: list[int] = []
        for count, completing in self._last.items():
            if count <= len(recent):
                tokens += completing.get(recent[-count:], ())
        return tokens


def _set(mask: np.ndarray, ids: np.ndarray) -> None:
    """Set the bits of these tokens, int64, to 1; those that the mask does not have are ignored."""
    ids = ids[ids < 32 * len(mask)]
    np.bitwise_or.at(mask, ids // 32, np.int32(1) << (ids % 32).astype(np.int32))


def _clear(mask: np.ndarray, ids: np.ndarray) -> None:
    """Set the bits of these tokens, int64, to 0; those that the mask does not have are ignored."""
    ids = ids[ids < 32 * len(mask)]
    np.bitwise_and.at(mask, ids // 32, ~(np.int32(1) << (ids % 32).astype(np.int32)))
