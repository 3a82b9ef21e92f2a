"""Tokens of the simulated device: they depend on a seed and a position only.

So a sequence continues the same, however it was scheduled.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from asyncllm.wire.messages import PooledPrompt, RowLogprobs, RowParams, ScoredPrompt

#: Mean number of tokens before an end of sequence.
MEAN_LENGTH: Final = 512

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class SimSampler:
    """Draws ordinary tokens evenly from the vocabulary, and now and then an end of sequence."""

    def __init__(self, num_slots: int, vocab_size: int, eos_ids: tuple[int, ...]):
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        ordinary = np.setdiff1d(np.arange(vocab_size), np.array(eos_ids, dtype=np.int64))
        self._ordinary = ordinary if len(ordinary) else np.arange(vocab_size)
        self._modulus = np.uint64(len(self._ordinary))
        self._rarity = np.uint64(_MASK // MEAN_LENGTH)
        #: Per slot: mixed seed; the end-of-sequence token (-1: none) and the length it needs.
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._ends = np.full((2, num_slots), -1, dtype=np.int64)
        self._stops: dict[int, frozenset[int]] = {}
        self._logprobs: dict[int, int] = {}
        #: Of scored prompts: their length, and the number of alternatives.
        self._prompts: dict[int, tuple[int, int]] = {}

    def admit(self, slot: int, params: RowParams) -> None:
        """A sequence takes a slot."""
        # Unmixed, neighbouring seeds would give the same tokens, shifted.
        self._seeds[slot] = _mix(np.array([params.seed & _MASK], dtype=np.uint64))[0]
        ends = [token for token in self._eos_ids if token in params.stop_ids]
        self._ends[:, slot] = (ends[0] if ends else -1, params.min_length)
        self._stops.pop(slot, None)
        self._logprobs.pop(slot, None)
        stops = frozenset(params.stop_ids).difference(self._eos_ids)
        if stops:
            self._stops[slot] = stops
        if params.logprobs >= 0:
            self._logprobs[slot] = params.logprobs

    def sample(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The next token of each sequence, int64 [n], given how long each is, int64 [n]."""
        bits = _mix(self._seeds[slots] + lengths.view(np.uint64) * np.uint64(_GOLDEN))
        tokens = self._ordinary[(bits % self._modulus).view(np.int64)]
        # The remainder chooses the token, the size decides whether the sequence ends.
        for row in (bits < self._rarity).nonzero()[0].tolist():
            eos, min_length = self._ends[:, slots[row]].tolist()
            if eos >= 0 and lengths[row] >= min_length:
                tokens[row] = eos
        if self._stops:
            self._avoid_stops(slots, tokens)
        return tokens

    def chances(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Random numbers that belong to seeds and lengths, but not those of ``sample``."""
        return chances(self._seeds[slots], lengths)

    def logprobs(
        self, rows: np.ndarray, slots: np.ndarray, tokens: np.ndarray
    ) -> tuple[RowLogprobs, ...]:
        """Logprobs of the rows that want them: all tokens are equally likely."""
        if not self._logprobs:
            return ()
        even = -math.log(self._vocab_size)
        entries = []
        for row, slot, token in zip(rows.tolist(), slots.tolist(), tokens.tolist(), strict=True):
            if slot in self._logprobs:
                count = min(self._logprobs[slot], self._vocab_size)
                top = tuple((token + i) % self._vocab_size for i in range(count))
                entries.append(RowLogprobs(row, even, top, (even,) * count))
        return tuple(entries)

    def score(self, slot: int, num_prompt: int, num_top: int) -> None:
        """Score the prompt in a slot, unless ``num_top`` is -1."""
        self._prompts.pop(slot, None)
        if num_top >= 0:
            self._prompts[slot] = (num_prompt, num_top)

    def prompts(
        self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[ScoredPrompt, ...]:
        """Scores for rows that compute positions start .. end-1 of scored prompts."""
        if not self._prompts:
            return ()
        even = -math.log(self._vocab_size)
        parts = []
        rows = zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for row, (slot, start, end) in enumerate(rows):
            num_prompt, num_top = self._prompts.get(slot, (0, 0))
            if start >= num_prompt:
                continue
            if end >= num_prompt:
                del self._prompts[slot]
            last = min(end + 1, num_prompt)
            shape = (last - start - 1, 1 + min(num_top, self._vocab_size))
            logprobs = np.full(shape, even, dtype="<f4")
            ids = np.maximum(np.arange(shape[1], dtype="<i4") - 1, 0)
            ids[0] = 1  # the rank
            ids = ids[None].repeat(shape[0], axis=0)
            parts.append(ScoredPrompt(row, start + 1, last, logprobs.tobytes(), ids.tobytes()))
        return tuple(parts)

    def _avoid_stops(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Replace a token that would stop its row by the next ordinary one that does not."""
        for row, slot in enumerate(slots.tolist()):
            stops = self._stops.get(slot, frozenset())
            if int(tokens[row]) in stops:
                at = int(np.searchsorted(self._ordinary, tokens[row]))
                later = np.roll(self._ordinary, -at).tolist()
                tokens[row] = next((token for token in later if token not in stops), tokens[row])


def chances(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number from 0 to 1 for each seed, uint64 [n], and position, int64 [n]: float64 [n]."""
    bits = _mix(_mix(seeds) + positions.view(np.uint64) * np.uint64(_GOLDEN))
    found: np.ndarray = bits / 2.0**64
    return found


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); uint64 [n]."""
    x = (x ^ (x >> _SHIFT_1)) * _FACTOR_1
    x = (x ^ (x >> _SHIFT_2)) * _FACTOR_2
    mixed: np.ndarray = x ^ (x >> _SHIFT_3)
    return mixed


class SimPooling:
    """A token's hidden state is the unit vector number ``id % size``.

    So the mean counts tokens, and texts with common tokens are similar: the hashing trick
    (Weinberger et al., ICML 2009).
    """

    def __init__(self, size: int):
        self._size = size
        self._first: dict[int, int] = {}

    def admit(self, slot: int, pool_from: int) -> None:
        """Pool the prompt in a slot from position ``pool_from`` on, unless it is -1."""
        self._first.pop(slot, None)
        if pool_from >= 0:
            self._first[slot] = pool_from

    def sums(
        self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, tokens: np.ndarray
    ) -> tuple[PooledPrompt, ...]:
        """Sums for rows that compute positions start .. end-1; tokens int32 [slots, positions]."""
        if not self._first:
            return ()
        parts = []
        rows = zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for row, (slot, start, end) in enumerate(rows):
            first = max(start, self._first.get(slot, end))
            if first < end:
                counts = np.bincount(tokens[slot, first:end] % self._size, minlength=self._size)
                parts.append(PooledPrompt(row, first, end, counts.astype("<f4").tobytes()))
        return tuple(parts)
