"""TokenConstraint: which tokens a sequence may sample next, given those it has sampled."""

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
    """The state of one sequence in its grammar. Methods set ``error`` instead of raising."""

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on, or None."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end of the sequence can follow, or the sequence has ended."""

    def accept(self, token: int) -> object:
        """Advance by a token; the grammar must not be finished."""

    def accept_bytes(self, text: bytes) -> object:
        """Advance by text that is part of a token."""


M = TypeVar("M", bound=Matcher)


class Grammars(Protocol[M]):
    """Makes matchers, and fills the masks of many at once."""

    def matcher(self, grammar: bytes) -> M:
        """A matcher at the beginning of the grammar that ``Constraints.grammar`` names; fast.

        Raises:
            Exception: there is no such grammar.
        """

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text."""

    def fill(self, matchers: Sequence[M], masks: np.ndarray) -> None:
        """Write which tokens each matcher allows next; end-of-sequence where the grammar may end.

        Args:
            masks: int32 [len(matchers), ceil(vocab / 32)], overwritten: bit i % 32 of word i // 32
                becomes 1 if token i is allowed.
        """


class TokenConstraint:
    """The constraint of one sequence and its state, on the host.

    The last token of a bad word is banned after the others, as with Hugging Face's
    ``bad_words_ids``; as in vLLM, only generated tokens count, not the prompt.

    Args:
        fixed: int32 [width], 0 where a token is never allowed.
        matcher: for a sequence with a grammar.
        error: why the sequence cannot sample, such as a grammar that could not be made.
        token_bytes: the text of a token; needed where markers of reasoning are texts.
    """

    def __init__(
        self,
        params: RowParams,
        fixed: np.ndarray,
        matcher: Matcher | None = None,
        error: str | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
    ):
        constraints = params.constraints or Constraints()
        self._matcher = matcher
        self._error = error
        self._fixed = fixed
        self._has_mask = bool(constraints.mask)
        self._bad_words = _BadWords(constraints.bad_words)
        # Without a grammar, the sampler bans stop tokens itself.
        self._min_length = params.min_length if constraints.grammar else 0
        self._stops = np.array(params.stop_ids, dtype=np.int64)
        self._reasoning = None
        if (reasoning := constraints.reasoning) is not None:
            if constraints.grammar:
                # The grammar bans the start texts' tokens, so reasoning cannot start with them.
                reasoning = msgspec.structs.replace(reasoning, start_texts=())
            self._reasoning = _ReasoningState(reasoning, token_bytes)

    @property
    def mask_matcher(self) -> Matcher | None:
        """The matcher that has to fill the mask before ``narrow``; None during reasoning."""
        return None if self._reasoning is not None and self._reasoning.inside else self._matcher

    def accept(self, token: int) -> None:
        """Advance by a sampled token; ignore BAD_TOKEN, which is negative."""
        if token >= 0:
            self._bad_words.accept(token)
            if self._reasoning is not None and self._reasoning.accept(token):
                # A token may end the reasoning and begin the answer; space in between is markup.
                answer = self._reasoning.beyond.lstrip()
                if answer and self._matcher is not None:
                    self._matcher.accept_bytes(answer)
                return
            # The row in flight when the grammar finished samples once more.
            if self._matcher is not None and not self._matcher.is_finished:
                self._matcher.accept(token)

    def narrow(self, mask: np.ndarray, length: int) -> str | None:
        """Clear the bits of tokens that are not allowed after ``length`` tokens.

        Args:
            mask: int32 [width], filled by ``mask_matcher``; overwritten if that is None.

        Returns:
            An error, in which case no token is allowed, or None.
        """
        matcher, reasoning = self.mask_matcher, self._reasoning
        error = self._error or (matcher.error if matcher is not None else None)
        if error is not None:
            mask[:] = 0
            return error
        if matcher is None:
            mask[:] = self._fixed
        if reasoning is not None:
            reasoning.change(mask, self._stops if self._matcher is not None else None)
        if matcher is not None and self._has_mask:
            mask &= self._fixed
        if banned := self._bad_words.completing():
            _clear(mask, np.array(banned))
        if length < self._min_length:
            later = mask.copy()
            _clear(later, self._stops)
            if later.any():
                mask[:] = later
        return None


class _ReasoningState:
    """The state of the reasoning at the beginning of an output."""

    def __init__(self, reasoning: Reasoning, token_bytes: Callable[[int], bytes] | None):
        self._span = ReasoningSpan(reasoning)
        self._token_bytes = token_bytes if self._span.reads_text else None
        self._starts = np.array(() if reasoning.is_open else reasoning.start_ids, dtype=np.int64)
        self._closing = reasoning.closing_ids or reasoning.end_ids[:1]
        self._recent: deque[int] = deque(maxlen=len(self._closing) - 1 if self._closing else 0)
        self._most = np.inf if reasoning.max_tokens is None else reasoning.max_tokens

    @property
    def inside(self) -> bool:
        """Whether the next token is part of the reasoning."""
        return self._span.inside

    @property
    def beyond(self) -> bytes:
        """The text of the last token after the end marker that it completed."""
        return self._span.beyond

    def accept(self, token: int) -> bool:
        """Advance by a token; returns whether it is part of the reasoning."""
        self._recent.append(token)
        text = b"" if self._token_bytes is None else self._token_bytes(token)
        return self._span.accept(token, text)

    def change(self, mask: np.ndarray, stops: np.ndarray | None) -> None:
        """Allow reasoning to start, and force its end in time; ban ``stops`` inside it."""
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
        """The next token of the closing marker, of which the recent tokens may be a beginning."""
        recent = tuple(self._recent)
        return next(
            self._closing[count]
            for count in range(len(recent), -1, -1)
            if recent[len(recent) - count :] == self._closing[:count]
        )


class _BadWords:
    """Bad words of several tokens, and the recent tokens."""

    def __init__(self, words: Iterable[tuple[int, ...]]):
        #: Last tokens, by the number of tokens before them and by those tokens.
        self._last: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in words:
            completing = self._last.setdefault(len(before), {})
            completing.setdefault(tuple(before), []).append(last)
        self._recent: deque[int] = deque(maxlen=max(self._last, default=0))

    def accept(self, token: int) -> None:
        self._recent.append(token)

    def completing(self) -> list[int]:
        """The tokens that would complete a bad word."""
        recent = tuple(self._recent)
        tokens: list[int] = []
        for count, completing in self._last.items():
            if count <= len(recent):
                tokens += completing.get(recent[-count:], ())
        return tokens


def _set(mask: np.ndarray, ids: np.ndarray) -> None:
    """Set the bits of these tokens, int64; those beyond the mask are ignored."""
    ids = ids[ids < 32 * len(mask)]
    np.bitwise_or.at(mask, ids // 32, np.int32(1) << (ids % 32).astype(np.int32))


def _clear(mask: np.ndarray, ids: np.ndarray) -> None:
    """Clear the bits of these tokens, int64; those beyond the mask are ignored."""
    ids = ids[ids < 32 * len(mask)]
    np.bitwise_and.at(mask, ids // 32, ~(np.int32(1) << (ids % 32).astype(np.int32)))
