"""The scheduler: which rows the next step computes, and what a finished step means.

Iteration-level scheduling (Yu et al., ORCA, OSDI 2022) without phases: a step is a list of rows,
each some next positions of one sequence, and a decode row is merely a row of length one. Decode
rows come first; what is left of the token budget goes to prompt chunks in order of arrival.

Pure: no torch, no I/O, no clock. The same calls in the same order give the same plans.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

from asyncllm.cache.manager import KVCacheManager
from asyncllm.config import EngineLimits
from asyncllm.engine.sequence import SeqState, Sequence
from asyncllm.types import FinishReason
from asyncllm.wire.messages import BAD_TOKEN, Admit, StepPlan, pack


class Emitted(NamedTuple):
    """One new token of one sequence; ``row`` is its row in the step.

    A BAD_TOKEN (the row's logits were not finite) is emitted once, and ends the sequence.
    """

    seq: Sequence
    row: int
    token: int
    finish: FinishReason | None


class Scheduler:
    """Owns every sequence's state, slots and, through the cache manager, pages.

    Steps are applied in the order in which they were planned. A sequence that ended or was
    preempted keeps slot and pages until no step in flight has a row of it.
    """

    def __init__(self, limits: EngineLimits, cache: KVCacheManager):
        self.limits = limits
        self.cache = cache
        # Keyed by id, so that an abort anywhere is O(1): waiting in order of service, running in
        # order of admission, oldest first.
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: dict[int, Sequence] = {}
        # Of the latest plan: what it took out of ``waiting``, and how many tokens it computes.
        self.admitted: list[Sequence] = []
        self.planned_tokens = 0
        self.num_preemptions = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[list[tuple[Sequence, bool]]] = deque()
        #: Sequences out of ``running`` whose pages come back once their rows have landed.
        self._settling = 0

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    # -- events ----------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting[seq.id] = seq

    def finish(self, seq: Sequence) -> None:
        """End a sequence now, wherever it is; tokens of it still in flight are dropped."""
        if seq.state is SeqState.RUNNING:
            del self.running[seq.id]
            self._leave(seq)
        elif seq.state is SeqState.WAITING:
            del self.waiting[seq.id]
        seq.state = SeqState.FINISHED

    # -- planning --------------------------------------------------------------------------------

    def plan(self, step: int) -> StepPlan | None:
        """The next step, or None when nothing can run before another event."""
        build = _PlanBuilder(self.limits.max_num_batched_tokens)
        self.admitted = []
        self._plan_decodes(build)
        self._plan_prefills(build)
        self._plan_admissions(build)
        if not build.rows:
            return None
        self._in_flight.append(build.sequences)
        self.planned_tokens = self.limits.max_num_batched_tokens - build.budget
        return StepPlan(
            step=step,
            rows=pack(build.rows),
            new_pages=pack(build.new_pages),
            admits=tuple(build.admits),
        )

    def _plan_decodes(self, build: _PlanBuilder) -> None:
        page_size = self.limits.page_size
        for seq in list(self.running.values()):
            if seq.state is not SeqState.RUNNING or seq.num_computed < seq.num_known:
                continue
            if len(seq.tokens) + seq.num_sampling >= seq.max_length:
                continue  # the last token it may have is already being sampled
            # Most rows stay on the page they are on.
            if seq.num_computed < len(seq.pages) * page_size or self._grow(seq, build):
                build.add_row(seq, 1, samples=True)

    def _plan_prefills(self, build: _PlanBuilder) -> None:
        for seq in self.running.values():
            if build.budget <= 0:
                return
            if seq.num_computed < seq.num_known:
                self._add_chunk(seq, build)

    def _plan_admissions(self, build: _PlanBuilder) -> None:
        while self.waiting and self._free_slots and build.budget > 0:
            seq = next(iter(self.waiting.values()))
            if seq.num_inflight:
                return  # preempted, and its last token has not landed yet
            # One page beside for each running sequence, lest the newcomer preempt it at once.
            needed = self.cache.pages_for(len(seq.tokens) + 1)
            if needed + len(self.running) > self.cache.num_free and self.running:
                return
            if not self.cache.extend(seq, len(seq.tokens)):
                return
            del self.waiting[seq.id]
            seq.slot = self._free_slots.pop()
            seq.state = SeqState.RUNNING
            seq.num_known = len(seq.tokens)
            seq.num_computed = 0
            self.running[seq.id] = seq
            self.admitted.append(seq)
            build.admit(seq)
            self._add_chunk(seq, build)

    def _add_chunk(self, seq: Sequence, build: _PlanBuilder) -> None:
        remaining = seq.num_known - seq.num_computed
        chunk = min(remaining, build.budget, self.limits.prefill_chunk)
        build.add_row(seq, chunk, samples=chunk == remaining)

    def _grow(self, seq: Sequence, build: _PlanBuilder) -> bool:
        """Room for one more position, preempting from the youngest when pages run out.

        False: the row sits this step out, or was itself the youngest. The oldest sequence is never
        a victim, so there is always progress.
        """
        held = len(seq.pages)
        while not self.cache.extend(seq, seq.num_computed + 1):
            if self._settling:
                return False  # pages are on their way back already
            victim = next(reversed(self.running.values()))
            if victim is seq and len(self.running) == 1:
                raise RuntimeError("the KV cache cannot hold one sequence of max_model_len")
            self._preempt(victim)
            if victim is seq:
                return False
        build.add_pages(seq, held)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the head of the queue with its tokens; the cache of it is given up."""
        del self.running[seq.id]
        seq.state = SeqState.WAITING
        self.waiting[seq.id] = seq
        self.waiting.move_to_end(seq.id, last=False)
        self.num_preemptions += 1
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        if seq.num_inflight:
            self._settling += 1
        else:
            self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        self.cache.release(seq)
        self._free_slots.append(seq.slot)
        seq.slot = -1

    # -- results ---------------------------------------------------------------------------------

    def apply(self, tokens: Seq[int]) -> list[Emitted]:
        """Take in the tokens of the oldest step in flight, one a row.

        Returns the new tokens in row order. Rows of ended sequences, and rows that sampled
        nothing, give none.
        """
        emitted = []
        for row, ((seq, samples), token) in enumerate(
            zip(self._in_flight.popleft(), tokens, strict=True)
        ):
            live = self._land(seq, samples)
            if not live or not samples:
                continue
            finish = None
            if token == BAD_TOKEN:
                self.finish(seq)
            else:
                seq.tokens.append(token)
                finish = self._finish_reason(seq, token)
                if finish is not None:
                    self.finish(seq)
            emitted.append(Emitted(seq, row, token, finish))
        return emitted

    def fail(self) -> list[Sequence]:
        """The oldest step in flight failed: end its live sequences and return them."""
        failed = []
        for seq, samples in self._in_flight.popleft():
            if self._land(seq, samples):
                self.finish(seq)
                failed.append(seq)
        return failed

    def _land(self, seq: Sequence, samples: bool) -> bool:
        """One row of ``seq`` is back; True when the sequence still wants its token."""
        seq.num_inflight -= 1
        if samples:
            seq.num_sampling -= 1
        if seq.state is not SeqState.RUNNING and seq.num_inflight == 0:
            self._settling -= 1
            self._settle(seq)
        return seq.state is not SeqState.FINISHED

    @staticmethod
    def _finish_reason(seq: Sequence, token: int) -> FinishReason | None:
        if token in seq.stop_ids and len(seq.tokens) > seq.min_length:
            return FinishReason.STOP
        if len(seq.tokens) >= seq.max_length:
            return FinishReason.LENGTH
        return None


class _PlanBuilder:
    """The rows, pages and admissions of one plan under construction, flat as they travel."""

    def __init__(self, budget: int):
        self.budget = budget
        self.rows: list[int] = []
        self.sequences: list[tuple[Sequence, bool]] = []
        self.new_pages: list[int] = []
        self.admits: list[Admit] = []

    def add_row(self, seq: Sequence, q_len: int, *, samples: bool) -> None:
        self.rows += (seq.slot, seq.num_computed, q_len)
        self.sequences.append((seq, samples))
        self.budget -= q_len
        seq.num_computed += q_len
        seq.num_sampling += samples
        seq.num_inflight += 1

    def add_pages(self, seq: Sequence, first: int) -> None:
        """The device learns of the pages from index ``first`` on."""
        for index in range(first, len(seq.pages)):
            self.new_pages += (seq.slot, index, seq.pages[index])

    def admit(self, seq: Sequence) -> None:
        self.admits.append(Admit(seq.slot, pack(seq.tokens), seq.num_prompt, seq.row_params))
        self.add_pages(seq, 0)
