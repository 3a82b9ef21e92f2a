"""From a plan's rows to the model's input tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import LogitRows
from asyncllm.executor.device import Device
from asyncllm.executor.step.slots import SlotTable
from asyncllm.kernels.tokens import locate_tokens
from asyncllm.kernels.types import Tokens
from asyncllm.kernels.upload import upload_aligned
from asyncllm.wire.messages import NO_TOKEN, UNKNOWN_DRAFT

#: In ``StepRows.entries``, the id of a token that only the device knows.
LAST_TOKEN = -1


class ScoredRow(NamedTuple):
    """A row with tokens of a prompt that is scored.

    Attributes:
        row: index in the plan.
        first: index of the row's first token among the step's; it predicts ``targets[0]``.
        start: position of ``targets[0]``.
        targets: int32 [n]; the scored tokens.
        num_top: likely alternatives wanted for each of them.
    """

    row: int
    first: int
    start: int
    targets: np.ndarray
    num_top: int


class PooledRow(NamedTuple):
    """A row with positions start .. end-1 (at least one) whose hidden states are pooled.

    Attributes:
        row: index in the plan.
        first: index of position ``start`` among the step's tokens.
    """

    row: int
    first: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a plan, on the host.

    A row samples after its last token; one that verifies a draft, after each of its tokens.

    Attributes:
        rows: int32 [n, 3] of (slot, start, q_len).
        state_slots: int32 [n]; the slots of their recurrent states. 0 in models without.
        entries: int32 [3, tokens]; id or LAST_TOKEN, slot and position of each token.
        sampling: int64 [samples]; the row of each sample.
        sample_at: int64 [samples]; the token that it follows.
        slots, lengths: int64 [samples]; slot, and sequence length before the sample.
        scored, pooled: the rows with tokens of prompts that are scored or pooled.
        drafts: int64 [samples]; the token that was drafted in place of the sample, NO_TOKEN where
            none was. None if there are no drafts.
        most_behind: int64 [n]; how many positions earlier than promised each row may start, which
            only the device knows. None if it is 0 for all.
        meant_behind: int64 [n]; for how many positions earlier what the host drafted is meant.
    """

    rows: np.ndarray
    state_slots: np.ndarray
    entries: np.ndarray
    sampling: np.ndarray
    sample_at: np.ndarray
    slots: np.ndarray
    lengths: np.ndarray
    scored: tuple[ScoredRow, ...] = ()
    pooled: tuple[PooledRow, ...] = ()
    drafts: np.ndarray | None = None
    most_behind: np.ndarray | None = None
    meant_behind: np.ndarray | None = None

    @property
    def reads_prompts(self) -> bool:
        """Whether prompts are scored or pooled."""
        return bool(self.scored or self.pooled)

    @property
    def each_samples_its_only_token(self) -> bool:
        """True for decode-only steps, and for those that cannot be told apart from one."""
        num_rows: int = len(self.rows)
        return len(self.sampling) == num_rows and self.entries.shape[1] == num_rows

    def continued(self, after: int) -> Self:
        """The decode rows that follow these decode rows, ``after`` tokens later."""
        if after == 0:
            return self
        moved = self.moved(np.full(len(self.rows), after))
        moved.entries[0] = LAST_TOKEN
        return moved

    def moved(self, by: np.ndarray) -> Self:
        """These rows, each so many positions later: int [n]."""
        rows, entries = self.rows.copy(), self.entries.copy()
        rows[:, 1] += by.astype(np.int32)
        entries[2] += by.astype(np.int32).repeat(rows[:, 2])
        return replace(self, rows=rows, entries=entries, lengths=self.lengths + by[self.sampling])

    @property
    def is_settled(self) -> bool:
        """Whether the host knows where each row starts, and what is drafted."""
        return self.most_behind is None and (self.drafts is None or not self.unknown_drafts.any())

    @property
    def unknown_drafts(self) -> np.ndarray:
        """The samples that are compared with what the device drafted: bool [samples]."""
        if self.drafts is None:
            return np.zeros(len(self.sampling), dtype=bool)
        unknown: np.ndarray = self.drafts == UNKNOWN_DRAFT
        return unknown

    @property
    def least_lengths(self) -> np.ndarray:
        """``lengths``, if all rows start as early as they may."""
        if self.most_behind is None:
            return self.lengths
        least: np.ndarray = self.lengths - self.most_behind[self.sampling]
        return least

    def settled(self, table: SlotTable) -> Self:
        """These rows as they are. Waits for the steps before, unless the host knows."""
        if self.is_settled:
            return self
        positions, drafted = table.look_up(self.rows[:, 0])
        starts = self.rows[:, 1].astype(np.int64)
        least = starts if self.most_behind is None else starts - self.most_behind
        moved = self.moved(positions.clip(least, starts) - starts)
        unknown = np.flatnonzero(self.unknown_drafts)
        if self.drafts is None or len(unknown) == 0:
            return replace(moved, most_behind=None)
        drafts = self.drafts.copy()
        drafts[unknown] = drafted[self.sampling[unknown], self.places[unknown]]
        moved.entries[0, self.sample_at[unknown] + 1] = drafts[unknown]
        return replace(moved, drafts=drafts, most_behind=None)

    @property
    def places(self) -> np.ndarray:
        """Samples of the same row that come before each sample: int64 [samples]."""
        firsts = np.searchsorted(self.sampling, self.sampling)
        places: np.ndarray = np.arange(len(self.sampling)) - firsts
        return places

    @classmethod
    def of(
        cls,
        rows: np.ndarray,
        table: SlotTable,
        state_slots: np.ndarray | None = None,
        drafts: np.ndarray | None = None,
        doubts: np.ndarray | None = None,
    ) -> Self:
        """Look up the tokens that came with admissions.

        Takes from the table what these rows' prompts still have to be scored or pooled.

        Args:
            rows: int32 [n, 3], n > 0.
            drafts, doubts: those of the ``StepPlan``.
        """
        if state_slots is None or len(state_slots) == 0:
            state_slots = np.zeros(len(rows), dtype=np.int32)
        slots, starts, q_lens = rows.astype(np.int64).T
        ends = np.cumsum(q_lens)
        known = table.num_known[slots]
        sampling = np.flatnonzero(starts + q_lens >= known)
        entries = np.empty((3, ends[-1]), dtype=np.int32)
        ids, token_slots, positions = entries
        ids.fill(LAST_TOKEN)
        token_slots[:] = slots.repeat(q_lens)
        positions[:] = np.arange(ends[-1]) + (starts - ends + q_lens).repeat(q_lens)
        for row in np.flatnonzero(starts < known):
            tokens = table.known(slots[row], starts[row], q_lens[row])
            ids[ends[row] - q_lens[row] : ends[row]] = tokens
        lengths = (starts + q_lens)[sampling]
        samples = sampling, ends[sampling] - 1, slots[sampling], lengths
        step = cls(rows, state_slots, entries, *samples)
        if drafts is not None and len(drafts):
            step = step._verifying((starts >= known) & (q_lens > 1), drafts)
        if doubts is not None and len(doubts):
            behind = np.zeros((2, len(rows)), dtype=np.int64)
            behind[:, doubts[:, 0]] = doubts[:, 1:].T
            step = replace(step, most_behind=behind[0], meant_behind=behind[1])
        if not table.scoring and not table.pooling:
            return step
        scored, pooled = tuple(_scored_rows(rows, table)), tuple(_pooled_rows(rows, table))
        return replace(step, scored=scored, pooled=pooled)

    def _verifying(self, rows: np.ndarray, drafts: np.ndarray) -> Self:
        """This step with the drafts of some rows, bool [n]."""
        q_lens = self.rows[:, 2].astype(np.int64)
        counts = np.zeros(len(rows), dtype=np.int64)
        counts[self.sampling] = 1
        counts[rows] = q_lens[rows]
        sampling = np.arange(len(rows)).repeat(counts)
        # From each sample to the last one of its row.
        left = counts.cumsum()[sampling] - 1 - np.arange(len(sampling))
        at = q_lens.cumsum()[sampling] - 1 - left
        lengths = self.rows[sampling, 1] + q_lens[sampling] - left
        drafted = left > 0
        expected = np.full(len(sampling), NO_TOKEN, dtype=np.int64)
        expected[drafted] = drafts
        self.entries[0, at[drafted] + 1] = drafts
        samples = {"sampling": sampling, "sample_at": at, "lengths": lengths}
        slots = self.rows[sampling, 0].astype(np.int64)
        return replace(self, slots=slots, drafts=expected, **samples)


def _scored_rows(rows: np.ndarray, table: SlotTable) -> Iterator[ScoredRow]:
    first = 0
    for row, (slot, start, q_len) in enumerate(rows.tolist()):
        scoring = table.take_scoring(slot, start, start + q_len)
        if scoring is not None:
            count = min(q_len, scoring.num_prompt - start - 1)
            targets = table.known(slot, start + 1, count)
            yield ScoredRow(row, first, start + 1, targets, scoring.num_top)
        first += q_len


def _pooled_rows(rows: np.ndarray, table: SlotTable) -> Iterator[PooledRow]:
    first = 0
    for row, (slot, start, q_len) in enumerate(rows.tolist()):
        end = start + q_len
        wanted = table.take_pooling(slot, end)
        if wanted is not None:
            begin = max(start, wanted)
            yield PooledRow(row, first + begin - start, begin, end)
        first += q_len


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors on the device.

    Attributes:
        sample_rows: int64 [scored + pooled + samples]; the tokens whose hidden states are needed:
            those that predict scored tokens, those that are pooled, then those that sample. None:
            all tokens.
        sample_slots: int64 [samples]; slots of the rows that sample.
        logit_rows: None with scored or pooled tokens, which are too many to attend one by one.
    """

    tokens: Tokens
    sample_rows: Tensor | None
    sample_slots: Tensor
    logit_rows: LogitRows | None


def upload_step(step: StepRows, table: SlotTable, page_size: int, device: Device) -> StepInputs:
    """Upload a step in one copy, and look up on the device what only the device knows."""
    at = step.sample_at
    if step.reads_prompts:
        scored = [row.first + np.arange(len(row.targets)) for row in step.scored]
        pooled = [row.first + np.arange(row.end - row.start) for row in step.pooled]
        at = np.concatenate([*scored, *pooled, at])
    host = (step.entries.reshape(-1), at, step.slots, step.lengths)
    entries, *samples = upload_aligned(host, np.int32, device.upload)
    sample_rows, sample_slots = (part.to(torch.int64) for part in samples[:2])
    return StepInputs(
        locate_tokens(entries.view(3, -1), table.last_token, table.block_table, page_size),
        None if step.each_samples_its_only_token and not step.pooled else sample_rows,
        sample_slots,
        None if step.reads_prompts else LogitRows(*samples[1:]),
    )
