"""What a step computes, what that costs, and the room that is left in it for prompts."""

from __future__ import annotations

import math
from typing import NamedTuple

MIN_CHUNK = 16


class StepShape(NamedTuple):
    """What a step computes.

    ``kv_tokens`` sums start + 1 over decode rows, the positions that they read. ``attention`` sums
    q_len * (start + q_len / 2) over prompt chunks, their query-key pairs.
    """

    num_tokens: int  # all rows' tokens, decode rows included
    kv_tokens: int
    attention: float


class StepCost(NamedTuple):
    """The model's coefficients, in seconds; none is negative."""

    base: float
    per_token: float  # of tokens above the knee
    per_kv: float
    per_pair: float
    knee: int

    def seconds(self, num_tokens: float, kv_tokens: float, attention: float) -> float:
        return (
            self.base
            + self.per_token * max(0.0, num_tokens - self.knee)
            + self.per_kv * kv_tokens
            + self.per_pair * attention
        )


UNKNOWN = StepCost(0.0, 0.0, 0.0, 0.0, 0)


class PrefillRoom:
    """The tokens and seconds left in one step for prompt chunks. Made by ``StepTimeModel.room``.

    Attributes:
        limit: what a step of a captured size may take; 0: its size does not matter.
    """

    __slots__ = ("_fresh", "_num_tokens", "cost", "limit", "seconds", "tokens")

    def __init__(
        self, tokens: int, seconds: float, cost: StepCost, num_tokens: int, limit: float = 0.0
    ) -> None:
        self.tokens = max(0, tokens)
        self.seconds = max(0.0, seconds)
        self.cost = cost
        self.limit = limit
        self._num_tokens = num_tokens  # of the step so far
        self._fresh = True

    def fit(self, start: int, wanted: int) -> int:
        """The longest chunk from position ``start``, at most ``wanted``, that still fits.

        0 when the step is full. The first chunk of a step gets at least min(wanted, 16, tokens):
        a model gone wrong must not starve prompts.
        """
        cost, hidden = self.cost, max(0, self.cost.knee - self._num_tokens)
        # A chunk costs per_pair * pairs + max(0, per_token * (q_len - hidden)): it fits when it
        # does with either side of the max.
        pairs = _longest(cost.per_pair * start, cost.per_pair, self.seconds)
        both = _longest(
            cost.per_token + cost.per_pair * start,
            cost.per_pair,
            self.seconds + cost.per_token * hidden,
        )
        limit = min(wanted, self.tokens)
        least = min(limit, MIN_CHUNK) if self._fresh else 0
        return max(0, least, int(min(limit, pairs, both)))

    def take(self, start: int, q_len: int) -> None:
        """A chunk of ``q_len`` tokens from position ``start`` was added to the step."""
        hidden = max(0, self.cost.knee - self._num_tokens)
        spent = self.cost.per_token * max(0, q_len - hidden)
        spent += self.cost.per_pair * num_pairs(start, q_len)
        self.seconds = max(0.0, self.seconds - spent)
        self.tokens = max(0, self.tokens - q_len)
        self._num_tokens += q_len
        self._fresh = False

    def end_with(self, tokens: int) -> None:
        """Have room for so many tokens, which complete a size, whatever they cost."""
        self.tokens, self.cost, self.limit = tokens, UNKNOWN, 0.0

    def split(self, share: float) -> PrefillRoom:
        """Set a share of the room aside; ``merge`` takes back what is left of it."""
        part = PrefillRoom(
            int(share * self.tokens), share * self.seconds, self.cost, self._num_tokens
        )
        self.tokens -= part.tokens
        self.seconds -= part.seconds
        return part

    def merge(self, part: PrefillRoom) -> None:
        """Undo ``split``, except for the chunks that ``part`` has taken."""
        self.tokens += part.tokens
        self.seconds += part.seconds
        self._num_tokens = part._num_tokens
        self._fresh = self._fresh and part._fresh


def num_pairs(start: int, q_len: int) -> float:
    return q_len * (start + q_len / 2)


def _longest(linear: float, quadratic: float, budget: float) -> float:
    """The largest q with linear * q + quadratic * q**2 / 2 <= budget; all are >= 0."""
    slope = linear + math.sqrt(linear * linear + 2.0 * quadratic * budget)
    if slope > 0.0:
        return 2.0 * budget / slope
    return 0.0 if quadratic > 0.0 else math.inf
