"""An acceptance process: drafts of simulated requests, whose tokens are right by chance."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple, Self

import numpy as np

from asyncllm.executor.sim.sampler import chances
from asyncllm.lab.replay.figures import Record

#: Something can be drafted for so many positions in a row, or for none of them: texts repeat others
#: in stretches.
STRETCH: Final = 16


class Acceptance(NamedTuple):
    """How good the drafts of a request are.

    Attributes:
        share: the share of positions for which something can be drafted.
        rate: how probable it is that a drafted token is right if those before are.
    """

    share: float
    rate: float

    @classmethod
    def of(cls, record: Record) -> Self | None:
        """As recorded; None if nothing was drafted."""
        if not record.num_drafts:
            return None
        tried = record.num_right + record.num_failed
        return cls(record.num_drafts / max(record.num_rows, 1), record.num_right / max(tried, 1))


class ChanceDraft:
    """A ``Draft`` by chance, the same for a request and a position in every run.

    A trace has no tokens, and a page's are all alike. So a drafted token says the position that it
    is meant for, and whether it is right there.
    """

    kind = "chance"
    prior = 0.6

    def __init__(self, id: int, acceptance: Acceptance):
        self._seeds = np.array([2 * id, 2 * id + 1], dtype=np.uint64)
        self._acceptance = acceptance

    def propose(self, tokens: array[int], most: int) -> Seq[int]:
        positions = len(tokens) + np.arange(most)
        if chances(self._seeds[:1], positions[:1] // STRETCH)[0] >= self._acceptance.share:
            return ()
        right = chances(self._seeds[1:], positions) < self._acceptance.rate
        drafted: list[int] = (2 * positions + right).tolist()
        return drafted


def count_right(length: int, draft: Seq[int]) -> int:
    """How many tokens of a ``ChanceDraft`` are right for a sequence of so many tokens."""
    right = (token == 2 * (length + i) + 1 for i, token in enumerate(draft))
    return next((i for i, is_right in enumerate(right) if not is_right), len(draft))
