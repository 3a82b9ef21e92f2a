"""A compiled grammar, and one sequence's way through it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TypeAlias

import llguidance
import numpy as np
from numpy.typing import NDArray

from asyncllm.text.grammar.oracle import first_line
from asyncllm.text.grammar.vocabulary import Vocabulary

#: Bit ``token % 32`` of word ``token // 32`` says whether a token is allowed.
Mask: TypeAlias = NDArray[np.int32] | NDArray[np.uint32]


class Grammar:
    """A compiled grammar; many sequences share it, in any threads.

    Attributes:
        num_bytes: about what it holds in memory.
    """

    __slots__ = ("_start", "_vocabulary", "num_bytes")

    def __init__(self, start: llguidance.LLMatcher, vocabulary: Vocabulary, num_bytes: int):
        self._start = start
        self._vocabulary = vocabulary
        self.num_bytes = num_bytes

    def matcher(self) -> Matcher:
        """A matcher at the start; takes some 5 us."""
        return Matcher(self._start.deep_copy(), self._vocabulary)


class Matcher:
    """Where one sequence is in its grammar. Not to be used by two threads at once.

    Nothing here raises because of a grammar or a token: a matcher that fails allows the end tokens
    only, and says why in ``error``.
    """

    __slots__ = ("_matcher", "_vocabulary")

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary):
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def error(self) -> str | None:
        """Why this sequence cannot go on: a token against the grammar, or a mask that costs too
        much. It stays."""
        return first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete: only an end token could follow, or one has."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def can_stop(self) -> bool:
        """Whether the output may end here: then, and only then, end tokens are allowed."""
        return self._matcher.is_accepting() and not self._matcher.is_error()

    def fill(self, row: Mask) -> None:
        """Write the mask of the next token.

        Args:
            row: [ceil(vocabulary / 32)], 32-bit words in a row.
        """
        if row.shape != (self._vocabulary.num_words,) or not row.flags.c_contiguous:
            raise ValueError(f"a mask row is {self._vocabulary.num_words} words in a row")
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and an error, if the grammar does not allow it."""
        size = self._vocabulary.size
        # What is no token at all would raise; one past the last is an error like any other.
        return self._matcher.consume_token(token if 0 <= token < size else size)

    def accept_bytes(self, text: bytes) -> bool:
        """Go on by a text, whatever its tokens; False, and an error, if it is not allowed."""
        return all(map(self.accept, self._vocabulary.tokenizer.tokenize_bytes(text)))

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, up to an end token, could follow one after the other.

        The matcher stays where it is: this is for guesses of a draft model.
        """
        ends = self._vocabulary.eos_ids
        text = list(takewhile(lambda token: token not in ends, tokens))
        return self._matcher.validate_tokens(text)

    def rollback(self, num_tokens: int) -> bool:
        """Go back by so many accepted tokens; False, and nothing done, if there is an error."""
        return self._matcher.rollback(num_tokens)

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next whatever the model says, as the tokenizer spells them."""
        forced = self._matcher.compute_ff_bytes()
        if not forced:
            return []
        return self._vocabulary.tokenizer.tokenize_partial(forced)[0]


class MaskFiller:
    """Fills the masks of a batch, in threads of its own while the GIL is free."""

    def __init__(self, vocabulary: Vocabulary, *, threads: int = 4):
        self._vocabulary = vocabulary
        self._executor = llguidance.LLExecutor(threads)

    def fill_rows(self, matchers: Sequence[Matcher | None], mask: Mask) -> None:
        """Write the masks of the next token; rows without a matcher allow every token.

        Args:
            matchers: one per row, each there once.
            mask: [len(matchers), ceil(vocabulary / 32)], 32-bit words in a row.
        """
        rows, words = len(matchers), self._vocabulary.num_words
        if mask.shape != (rows, words) or not mask.flags.c_contiguous or mask.itemsize != 4:
            raise ValueError(f"the mask must be {rows} rows of {words} words in a row")
        pairs = [
            (matcher._matcher, row) for row, matcher in enumerate(matchers) if matcher is not None
        ]
        if len(pairs) < rows:
            mask[[row for row, matcher in enumerate(matchers) if matcher is None]] = ~np.zeros(
                (), mask.dtype
            )
        if pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, mask.ctypes.data, words * 4, rows)
