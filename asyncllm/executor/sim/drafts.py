"""Drafts on the simulated device: how far each is right, and what its row yields."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from asyncllm.executor.sim.pages import BrokenPlan
from asyncllm.executor.sim.sampler import SimSampler
from asyncllm.wire.messages import NO_TOKEN, UNKNOWN_DRAFT, RowLogprobs

#: How probable it is that a token of a head is right if those before are, where nothing is said.
HEAD_RATE: Final = 0.7


class SimDrafts:
    """The rows of a step that verify drafts.

    Attributes:
        rows: int32 [n, 3]; the plan's rows, those with drafts only as far as these are right.
        right: slot, position and tokens of each draft, as far as it is right.
    """

    def __init__(
        self,
        sampler: SimSampler,
        rate: float | None,
        packed: np.ndarray,
        misled: np.ndarray,
        drafts: np.ndarray,
        known: np.ndarray,
        room: np.ndarray,
    ):
        """
        Args:
            rate: how probable it is that a drafted token is right if those before are, unless the
                draft is misled; None: what the sampler says is right.
            packed: int32 [n, 3]; the rows of the plan.
            misled: bool [n]; drafts that are of another place than the device is at.
            drafts: ``StepPlan.drafts``.
            known, room: int [n]; tokens at the admission of each row's sequence, and positions that
                have pages.

        Raises:
            BrokenPlan: drafts and rows do not fit each other, or have no pages.
        """
        self._sampler = sampler
        self._rate = rate
        self._row_of: list[int] = []
        self.rows = packed.copy()
        self.right: list[tuple[int, int, list[int]]] = []
        left = drafts.tolist()
        for row, (slot, start, q_len) in enumerate(packed.tolist()):
            if q_len == 1 or start < known[row]:
                continue
            if start + q_len > room[row] or len(left) < q_len - 1:
                raise BrokenPlan(f"slot {slot} has a draft without pages, or without tokens")
            draft, left = left[: q_len - 1], left[q_len - 1 :]
            draft, count = self._right(slot, start + 1, draft, misled=bool(misled[row]))
            self.right.append((slot, start + 1, draft[:count]))
            self.rows[row, 2] = 1 + count
            self._row_of.append(row)
        if left:
            raise BrokenPlan(f"{len(left)} drafted tokens belong to no row")

    def results(
        self, last: np.ndarray, logprobs: tuple[RowLogprobs, ...]
    ) -> tuple[bytes, tuple[RowLogprobs, ...]]:
        """``tokens`` and ``logprobs`` of the result, given those of each row's last token."""
        num_rows, places = len(last), self.rows[:, 2] - 1
        tokens = np.full((1 + int(places[self._row_of].max()), num_rows), NO_TOKEN, dtype=np.int32)
        tokens[0] = last
        index = np.arange(num_rows)
        found: list[RowLogprobs] = []
        for row, (slot, _, right) in zip(self._row_of, self.right, strict=True):
            tokens[: len(right) + 1, row] = [*right, last[row]]
            index[row] += len(right) * num_rows
            where = row + num_rows * np.arange(len(right))
            drafted = np.array(right, dtype=np.int64)
            found += self._sampler.logprobs(where, np.full(len(right), slot), drafted)
        found += (msgspec.structs.replace(entry, row=int(index[entry.row])) for entry in logprobs)
        return tokens.tobytes(), tuple(found)

    def _right(
        self, slot: int, length: int, draft: list[int], *, misled: bool
    ) -> tuple[list[int], int]:
        """A draft, and how many of its tokens a sequence of ``length`` tokens would sample itself.

        What the device drafts is what it would sample, where it is right.
        """
        lengths, slots = length + np.arange(len(draft)), np.full(len(draft), slot)
        sampled, tokens = self._sampler.sample(slots, lengths), np.array(draft)
        of_head = tokens == UNKNOWN_DRAFT
        tokens[of_head] = sampled[of_head]
        if self._rate is not None or of_head.any():
            rate = HEAD_RATE if self._rate is None else self._rate
            chances = self._sampler.chances(slots, lengths)
            right = (chances < rate) & (of_head | (not misled))
        else:
            right = sampled == tokens
        return tokens.tolist(), int(right.cumprod().sum())


def settled(
    promised: np.ndarray, doubts: np.ndarray, due: np.ndarray, room: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a plan, int32 [n, 3], from where the last row of each slot got to.

    And whether each row's draft is meant for another place: bool [n].

    Args:
        doubts: ``StepPlan.doubts``.
        due, room: int [slots]; where each got to, and positions that have pages.

    Raises:
        BrokenPlan: a row is due beyond what it was promised, or too far before, or has no pages for
            what it was promised.
    """
    if len(doubts) == 0:
        return promised, np.zeros(len(promised), dtype=bool)
    if doubts.min() < 0 or doubts[:, 0].max() >= len(promised):
        raise BrokenPlan("there is no row that follows a draft, where there should be one")
    rows, most, meant = doubts.T
    slots, starts, q_lens = promised[rows].T
    wrong = (due[slots] > starts) | (due[slots] < starts - most) | (starts + q_lens > room[slots])
    if np.count_nonzero(wrong):
        slot, start, q_len = promised[rows[wrong.argmax()]]
        raise BrokenPlan(
            f"slot {slot} follows a draft: its next position is {due[slot]}, but it was to be at "
            f"most {most[wrong.argmax()]} before {start}, with pages for {q_len} positions after it"
        )
    found = promised.copy()
    found[rows, 1] = due[slots]
    misled = np.zeros(len(promised), dtype=bool)
    misled[rows] = due[slots] != starts - meant
    return found, misled
