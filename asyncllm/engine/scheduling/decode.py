"""Decode: the rows of a step that continue sequences by one token, and the pages they need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.scheduling.batch import Ints, RunningBatch
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.departures import Departures
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.speculation.choice import NOTHING, Choice, Drafted, Speculation
from asyncllm.engine.scheduling.states import States
from asyncllm.engine.scheduling.step import Step
from asyncllm.engine.scheduling.timing.prefill_room import StepShape, num_pairs
from asyncllm.engine.scheduling.waiting.admission import Admission

#: A step decodes several tokens of each row only if it takes no longer than this, in seconds: the
#: first of them is delivered that much later.
MULTI_STEP_SECONDS = 5e-3


@dataclass(eq=False)
class DecodePlanner:
    """Gives every sequence that generates its next row. Owns nothing."""

    limits: EngineLimits
    cache: KVCacheManager
    forecast: Forecast
    copies: PageCopies
    admission: Admission
    batch: RunningBatch
    departures: Departures
    states: States
    speculation: Speculation
    #: Of the last plan.
    choice: Choice = NOTHING

    def plan(self, step: Step, now: float, num_waiting: int) -> None:
        """One row for each sequence that generates; those without a page for it skip this step.

        Args:
            num_waiting: requests that are not running.
        """
        drafts: list[Drafted] = []
        if self.limits.max_draft_tokens:
            drafts = self._choose_drafts(step, num_waiting)
        self._plan_decodes(step, drafts, now, num_waiting)
        if drafts:
            self._plan_drafts(step, drafts)
        step.ahead = self.choice.ahead
        self.batch.drafts_ahead(step.number, step.ahead)

    def _choose_drafts(self, step: Step, num_waiting: int) -> list[Drafted]:
        """Pause the sequences that skip this step; returns the drafts that there are pages for."""
        batch, done = self.batch, self.departures.last_done
        self.choice = choice = self.speculation.choose(batch, done, num_waiting)
        for seq in choice.held:
            batch.pause(seq)
        return [draft for draft in choice.drafts if self._has_pages(draft, step)]

    def _has_pages(self, draft: Drafted, step: Step) -> bool:
        """Grow the sequence for its draft, if there are free pages.

        Also for the tokens that a head drafts then: it has their K and V before the next plan.
        """
        seq, needed = draft.seq, draft.start + 1 + len(draft.tokens) + self.choice.ahead
        needed = min(needed, int(self.batch.stop_at[seq.slot]) + 1)
        while self.batch.capacity[seq.slot] < needed:
            page = self.cache.grow(seq.kv)
            if page is None:
                return False
            self._grew(seq, page, step)
        return True

    def _grew(self, seq: Sequence, page: int, step: Step) -> None:
        self.admission.grew(seq)
        self.batch.grown(seq)
        step.new_pages += (seq.slot, len(seq.kv.pages) - 1, page)

    def _plan_drafts(self, step: Step, drafts: list[Drafted]) -> None:
        """Rows that verify drafts; not of sequences that were preempted for the others' pages."""
        step.drafts = tuple(draft for draft in drafts if draft.seq.id in self.batch.running)
        tokens, kv_tokens, pairs = step.shape
        for row, draft in enumerate(step.drafts, len(step.decodes)):
            slot, start, q_len = draft.row
            if doubt := int(self.batch.doubt[slot]):
                step.doubts += (row, doubt, start + 1 - draft.length)
            self.batch.add_draft(draft.seq, q_len - 1, step.number)
            tokens, pairs = tokens + q_len, pairs + num_pairs(start, q_len)
        step.shape = StepShape(tokens, kv_tokens, pairs)
        if step.drafts:
            self.speculation.planned(step.number, step.drafts)

    def _plan_decodes(
        self, step: Step, drafts: list[Drafted], now: float, num_waiting: int
    ) -> None:
        """The rows of one token, of sequences without a draft."""
        batch = self.batch
        slots = self._slots_without(drafts)
        if not len(slots):
            return
        starts = batch.computed[slots]
        step.decode_steps = decode_steps = self._decode_steps(slots, starts, num_waiting)
        full = slots[starts + decode_steps > batch.capacity[slots]]
        if full.size:
            self._grow(full, step, now)
            slots = self._slots_without(drafts)  # some may have been preempted
            starts = batch.computed[slots]
        ready = starts + decode_steps <= batch.capacity[slots]
        if not ready.all():
            slots, starts = slots[ready], starts[ready]
        step.decodes = batch.decoding
        if len(slots) < len(step.decodes):
            step.decodes = [seq for slot in slots.tolist() if (seq := batch.sequences[slot])]
        count = len(slots)
        if count == 0:
            return
        rows = np.empty((count, 3), dtype="<i4")
        rows[:, 0] = slots
        rows[:, 1] = starts
        rows[:, 2] = 1
        step.decode_rows = rows.tobytes()
        step.shape = StepShape(count, int(starts.sum()) + count, 0.0)
        if len(doubtful := np.flatnonzero(doubt := batch.doubt[slots])):
            most = doubt[doubtful]
            step.doubts += np.stack([doubtful, most, 0 * most], axis=1).ravel().tolist()
        batch.add_decodes(slots, starts, step.number, decode_steps)
        self.states.decodes_planned(slots, starts)

    def _slots_without(self, drafts: list[Drafted]) -> Ints:
        """Those that may have a row of one token. The others get no page either: if nobody has a
        row, there is no step that tells the device of it."""
        batch = self.batch
        slots = batch.slots()
        if drafts:
            slots = slots[np.isin(slots, [draft.seq.slot for draft in drafts], invert=True)]
        if batch.keep_at is not None:  # before the state is kept, it must be known where it is
            early = batch.computed[slots] < batch.keep_at[slots]
            slots = slots[early | (batch.doubt[slots] == 0)]
        return slots

    def _decode_steps(self, slots: Ints, starts: Ints, num_waiting: int) -> int:
        """How many tokens each row yields: one, unless there is nothing else to do."""
        batch, most = self.batch, self.limits.max_decode_steps
        if most == 1 or not 0 < len(slots) <= self.limits.multi_step_rows:
            return 1
        if batch.prefilling or num_waiting or batch.paused or self.copies.outstanding:
            return 1
        if self.choice.drafts or batch.doubt[slots].any():
            return 1
        if most * self.forecast.decode_seconds > MULTI_STEP_SECONDS:
            return 1
        pages = len(slots) * self.cache.pages_for(most + self.limits.page_size)
        if self.cache.num_available < pages:
            return 1  # no sequence is preempted for it
        if not self.states.allow_multi_step(slots, starts, most):
            return 1
        # All or one: each other number would be one more graph to capture.
        return most if (batch.stop_at[slots] - starts).min() >= most else 1

    def _grow(self, slots: Ints, step: Step, now: float) -> None:
        """Pages for the next tokens of ``slots``; sequences that get none skip this step."""
        batch = self.batch
        for seq in [batch.sequences[slot] for slot in slots.tolist()]:
            assert seq is not None, "a running slot has a sequence"
            needed = int(batch.computed[seq.slot]) + step.decode_steps
            while seq.state is SeqState.RUNNING and batch.capacity[seq.slot] < needed:
                page = self.cache.grow(seq.kv)
                if page is not None:
                    self._grew(seq, page, step)
                elif not self.departures.make_room(step, now):
                    break
