"""Pooled hidden states of the simulated device."""

from __future__ import annotations

import numpy as np

from asyncllm.wire.messages import PooledPrompt


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
