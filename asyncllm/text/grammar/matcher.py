"""A vocabulary, a compiled grammar, the state of one sequence in it, the masks of a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import llguidance
import numpy as np
from numpy.typing import NDArray

from asyncllm.errors import BadRequest
from asyncllm.text.grammar.oracle import error_text
from asyncllm.text.tokenizer import Tokenizer

#: Bit ``token % 32`` of word ``token // 32`` says whether a token is allowed.
Mask: TypeAlias = NDArray[np.int32] | NDArray[np.uint32]
#: CPU time that each mask, and each accepted token, may take. Random outputs under the costliest
#: real schemas take 0.5 ms a token with 128,000 tokens, most take 0.05.
FILL_SECONDS = 1e-3
ACCEPT_SECONDS = 1e-4
#: Total time beyond that after which a sequence is ended.
MOST_EXCESS = 0.1
#: If several rows take more than FILL_SECONDS, they delay the step together. So the excess of each
#: is multiplied by their number, but at most by this:
MOST_SHARED = 8
#: The first masks of a sequence, which build the lexer's states, are not multiplied.
FIRST_FILLS = 4
#: A batch of masks that takes longer (in all, and per row of a thread) has a row that costs too
#: much; the rows of the next batches are timed one by one.
_SLOW_BATCH = 2e-3
_SLOW_ROW = 1e-4
_TIMED_BATCHES = 16


class _Tokens:
    """The bytes that every token adds to the text: the grammar sees what is sent."""

    is_tokenizer_wrapper = True  # how the library knows one
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int):
        known = range(min(tokenizer.vocab_size, vocab_size))
        self.tokens = [tokenizer.token_bytes(token) for token in known]
        # Ids without a token get no bytes: they are never allowed.
        self.tokens += [b""] * (vocab_size - len(known))
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token in known)
        self.eos_token_id = eos_id
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


class Vocabulary:
    """The tokens of masks. Building it takes 0.6 us per token, plus 30 ms at 150k.

    Attributes:
        size: of the logits; the tokenizer may have fewer tokens.
        num_words: 32-bit words of a mask.
        eos_ids: tokens that end a sequence.
        special_tokens: texts and ids of special tokens; None for one that ends a sequence.
        tokenizer: the library's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        """Raises BadRequest if the tokenizer's tokens have no bytes of their own."""
        if not tokenizer.joins_bytes:
            raise BadRequest("structured output is not supported with this model's tokenizer")
        if not eos_ids:
            raise BadRequest("structured output is not supported: the model has no end token")
        self.size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self.eos_ids = frozenset(eos_ids)
        tokens = _Tokens(tokenizer, vocab_size, eos_ids[0])
        self.special_tokens = {
            tokens.tokens[token].decode(errors="replace"): None if token in self.eos_ids else token
            for token in tokens.special_token_ids
        }
        self.tokenizer = llguidance.LLTokenizer(
            tokens,  # type: ignore[arg-type]
            eos_token=list(eos_ids),
        )


class Grammar:
    """A compiled grammar; many sequences share it, in any threads.

    Attributes:
        key: ``spec.cache_key`` of its spec.
        num_bytes: its memory, estimated.
    """

    __slots__ = ("__weakref__", "_start", "_vocabulary", "key", "num_bytes")

    def __init__(
        self, key: bytes, start: llguidance.LLMatcher, vocabulary: Vocabulary, num_bytes: int
    ):
        self.key = key
        self._start = start
        self._vocabulary = vocabulary
        self.num_bytes = num_bytes

    def matcher(self) -> Matcher:
        """A matcher at the start; takes some 5 us."""
        return Matcher(self._start.deep_copy(), self._vocabulary)


class Matcher:
    """The state of one sequence in its grammar. Not to be used by two threads at once.

    No grammar and no token makes a method raise: a matcher that fails sets ``error`` and allows the
    end tokens only. It also fails when it has taken too much time, as the steps of all other
    sequences wait for its masks.
    """

    __slots__ = ("_excess", "_matcher", "_num_fills", "_times", "_vocabulary")

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary):
        self._excess = 0.0
        self._num_fills = 0
        self._times = 1  # that excess is charged
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def error(self) -> str | None:
        """Why this sequence has failed for good: a token against the grammar, or too much time."""
        if self._excess > MOST_EXCESS:
            return "the grammar is too costly: computing which tokens may follow takes too long"
        if not self._matcher.is_error():
            return None
        return error_text(self._matcher.get_error())

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete: only an end token could follow, or one has."""
        return self._matcher.is_stopped() and self.error is None

    @property
    def can_stop(self) -> bool:
        """Whether the output may end here: then, and only then, end tokens are allowed."""
        return self._matcher.is_accepting() and self.error is None

    def fill(self, row: Mask) -> None:
        """Write the mask of the next token.

        Args:
            row: [ceil(vocabulary / 32)], 32-bit words in a row.
        """
        if row.shape != (self._vocabulary.num_words,) or not row.flags.c_contiguous:
            raise ValueError(f"a mask row is {self._vocabulary.num_words} words in a row")
        self.charge_fill(self.timed_fill(row.ctypes.data, row.nbytes), 1)

    def timed_fill(self, address: int, num_bytes: int) -> float:
        """``fill`` by address; returns its CPU seconds, for ``charge_fill``."""
        begun = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        return time.thread_time() - begun

    def charge_fill(self, seconds: float, num_slow: int) -> None:
        """Count the time of a mask, in a step in which ``num_slow`` rows took too long."""
        self._num_fills += 1
        shared = self._num_fills > FIRST_FILLS
        self._times = max(1, min(num_slow, MOST_SHARED)) if shared else 1
        self._charge(seconds, FILL_SECONDS)

    def _charge(self, seconds: float, allowed: float) -> None:
        """Count time beyond ``allowed``; time left over reduces earlier excess."""
        if self._excess > MOST_EXCESS:
            return
        excess = seconds - allowed
        self._excess = max(0.0, self._excess + (excess * self._times if excess > 0 else excess))

    def accept(self, token: int) -> bool:
        """Accept a token; False, and an error, if the grammar does not allow it."""
        size = self._vocabulary.size
        # An id out of range would raise; the one past the last is an error like any other.
        begun = time.thread_time()
        accepted = self._matcher.consume_token(token if 0 <= token < size else size)
        self._charge(time.thread_time() - begun, ACCEPT_SECONDS)
        return accepted

    def accept_bytes(self, text: bytes) -> bool:
        """Accept a text, whatever its tokens; False, and an error, if it is not allowed."""
        return all(map(self.accept, self._vocabulary.tokenizer.tokenize_bytes(text)))

    def forced(self) -> list[int]:
        """The tokens that must follow; none if there is a choice, or after an error."""
        if self._matcher.is_error() or self._matcher.is_stopped():
            return []
        begun = time.thread_time()
        # Without the bytes, the library finds no tokens.
        forced = self._matcher.compute_ff_tokens() if self._matcher.compute_ff_bytes() else []
        self._charge(time.thread_time() - begun, ACCEPT_SECONDS)
        return [] if self.error is not None else forced

    def rollback(self, num_tokens: int) -> bool:
        """Take back the last accepted tokens; False, and no change, if there is an error."""
        return self._matcher.rollback(num_tokens)


class MaskFiller:
    """Fills the masks of a batch in its own threads, without the GIL."""

    def __init__(self, vocabulary: Vocabulary, *, threads: int = 4):
        self._vocabulary = vocabulary
        self._threads = threads
        self._executor = llguidance.LLExecutor(threads)
        self._batches_to_time = 0

    def fill_rows(self, matchers: Sequence[Matcher | None], mask: Mask) -> None:
        """Write the masks of the next token; rows without a matcher allow every token.

        Args:
            matchers: one per row, each there once.
            mask: [len(matchers), ceil(vocabulary / 32)], 32-bit words in a row.
        """
        rows, words = len(matchers), self._vocabulary.num_words
        if mask.shape != (rows, words) or not mask.flags.c_contiguous or mask.itemsize != 4:
            raise ValueError(f"the mask must be {rows} rows of {words} words in a row")
        filled = [(matcher, row) for row, matcher in enumerate(matchers) if matcher is not None]
        if len(filled) < rows:
            mask[[row for row, matcher in enumerate(matchers) if matcher is None]] = ~np.zeros(
                (), mask.dtype
            )
        if len(filled) == 1 or self._batches_to_time:
            self._batches_to_time = max(0, self._batches_to_time - 1)
            took = [
                (matcher, matcher.timed_fill(mask.ctypes.data + row * words * 4, words * 4))
                for matcher, row in filled
                if matcher.error is None
            ]
            num_slow = sum(seconds > FILL_SECONDS for _, seconds in took)
            for matcher, seconds in took:
                matcher.charge_fill(seconds, num_slow)
        elif filled:
            self._fill_together(filled, mask)

    def _fill_together(self, filled: Sequence[tuple[Matcher, int]], mask: Mask) -> None:
        pairs = [(matcher._matcher, row) for matcher, row in filled]
        rows, words = mask.shape
        begun = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(pairs, mask.ctypes.data, words * 4, rows)
        seconds = time.perf_counter() - begun
        if seconds > _SLOW_BATCH + _SLOW_ROW * len(pairs) / self._threads:
            self._batches_to_time = _TIMED_BATCHES
