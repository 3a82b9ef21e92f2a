"""How long outputs become, learned from those that have ended and those under way."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

#: The first bin has the outputs of fewer tokens than this. Beyond, each factor of two has PARTS.
FIRST, PARTS = 16, 4
#: Up to 2**24 tokens.
NUM_BINS: Final = 1 + 20 * PARTS
#: The assumption before any output has ended: none ends before this many tokens, and half of them
#: end within each factor of two beyond. If it is too high, few requests are admitted until the
#: first outputs have ended. If it is too low, the cache fills with outputs that it cannot hold.
FIRST_GUESS: Final = 1024
#: The assumption counts as this many outputs.
PRIOR_WEIGHT: Final = 0.25
#: Outputs over which a bin's share is averaged.
MEMORY: Final = 64.0
#: The tables are made anew after so many observations, or an eighth of all so far if these are
#: fewer: it takes as long as planning a step of 64 rows.
REFRESH: Final = 64
#: A smaller share of outputs is not told from none.
LEAST: Final = 1e-9


def bin_of(num_tokens: int) -> int:
    """The bin of outputs that end with this many tokens."""
    if num_tokens < FIRST:
        return 0
    doublings = num_tokens.bit_length() - FIRST.bit_length()
    part = PARTS * num_tokens // (FIRST << doublings) - PARTS
    return min(1 + PARTS * doublings + part, NUM_BINS - 1)


def _first_of(index: int) -> int:
    """The shortest output of a bin."""
    doublings, part = divmod(index - 1, PARTS)
    return (FIRST << doublings) * (PARTS + part) // PARTS if index else 0


_FIRSTS: Final = tuple(_first_of(index) for index in range(NUM_BINS + 1))


class OutputLengths:
    """Of each bin, the share of the outputs reaching it that end in it.

    This is the estimator of Kaplan and Meier (1958), with exponential forgetting. An output under
    way counts in all bins that it has passed. So short outputs, which end first, do not make all
    outputs look short, and long ones are noticed before the first of them has ended.
    """

    def __init__(
        self, first_guess: float = FIRST_GUESS, prior_weight: float = PRIOR_WEIGHT
    ) -> None:
        """
        Args:
            first_guess, prior_weight: take the places of ``FIRST_GUESS`` and ``PRIOR_WEIGHT``. With
                infinity, the assumption is that none ends.
        """
        self._first_guess = first_guess
        self._prior_weight = prior_weight
        self._seen = [0.0] * NUM_BINS
        self._ended = [0.0] * NUM_BINS
        self._num_seen = self._refresh_at = 0
        # At the beginning of each bin:
        self._survival: list[float] = []  # the share of all outputs that get there
        self._means: list[float] = []  # the mean of all outputs, each cut off there

    def passed(self, index: int) -> None:
        """An output has become longer than those of a bin."""
        self._saw(index, 0.0)

    def ended(self, index: int) -> None:
        """An output has ended in a bin."""
        self._saw(index, 1.0)

    def expected(self, num_tokens: int, most: int) -> float:
        """The expected length of an output that has ``num_tokens`` and may get ``most``."""
        if num_tokens >= most:
            return float(most)
        if self._num_seen >= self._refresh_at:
            self._tabulate()
            self._refresh_at = self._num_seen + min(max(1, self._num_seen // 8), REFRESH)
        share, mean = self._at(num_tokens)
        return num_tokens + (self._at(most)[1] - mean) / share

    def _saw(self, index: int, ended: float) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self._seen[index] = keep * self._seen[index] + 1.0
        self._ended[index] = keep * self._ended[index] + ended
        self._num_seen += 1

    def _tabulate(self) -> None:
        survival, areas = [1.0], []
        for index in range(NUM_BINS):
            first, after = _FIRSTS[index], _FIRSTS[index + 1]
            prior = (after - first) / after if first >= self._first_guess else 0.0
            ended = self._ended[index] + self._prior_weight * prior
            share = ended / (self._seen[index] + self._prior_weight)
            survival.append(max(LEAST, survival[-1] * (1.0 - share)))
            areas.append((after - first) * (survival[-2] + survival[-1]) / 2.0)
        self._survival = survival
        self._means = [0.0, *accumulate(areas)]

    def _at(self, num_tokens: int) -> tuple[float, float]:
        """``_survival`` and ``_means`` at any length: outputs end evenly within a bin."""
        index = bin_of(num_tokens)
        first, after = _FIRSTS[index], _FIRSTS[index + 1]
        begins, ends = self._survival[index], self._survival[index + 1]
        tokens = min(num_tokens, after) - first
        share = begins + (ends - begins) * tokens / (after - first)
        return share, self._means[index] + tokens * (begins + share) / 2.0
