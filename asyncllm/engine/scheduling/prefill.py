"""Prefill: which prompt chunks a step gets."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.pace import Pace
from asyncllm.engine.scheduling.sequence import FOREVER, SeqState, Sequence, Turn
from asyncllm.engine.scheduling.states import States
from asyncllm.engine.scheduling.step import Chunk, Step
from asyncllm.engine.scheduling.timing.prefill_room import MIN_CHUNK, PrefillRoom
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from asyncllm.engine.scheduling.waiting.admission import Admission, Entry

#: The share of each step's room for prompts that short prompts get first. It bounds what a wall of
#: long prompts pays for them.
SHORT_SHARE = 0.15
#: While prompts of this many seconds wait, steps may take this multiple of the target. Of 256
#: clients that come at once, 8B on an H200 answers the last ones after 3.8 s instead of 4.5.
BACKLOG_SECONDS, BACKLOG_TARGET = 2.0, 5 / 3
#: With so many of those that wait, a newcomer is compared to see where they leave its path.
MOST_COMPARED = 4


@dataclass(eq=False)
class PrefillPlanner:
    """Fills steps with prompt chunks, and admits waiting sequences in their turn. Owns nothing."""

    limits: EngineLimits
    cache: KVCacheManager
    policy: Policy
    forecast: Forecast
    times: StepTimeModel
    copies: PageCopies
    admission: Admission
    batch: RunningBatch
    states: States
    pace: Pace

    def plan(self, step: Step, now: float) -> None:
        """Chunks of the first prompts, admitted or waiting, until the step is full."""
        if not self.batch.prefilling and not len(self.admission.waiting):
            return
        num_decodes, waiting = step.shape.num_tokens, self.admission.waiting.queue
        pace = self.pace.prompt_tokens(step.number, num_decodes, waiting, self.batch)
        budget = int(min(self._most_tokens(num_decodes) - num_decodes, pace))
        room = self.times.room(step.shape, self._target(), budget)
        self._fill_share(step, room, now)
        self._fill(step, room, now, self._turn, self.admission.head)

    def _most_tokens(self, num_decodes: int) -> int:
        """The most tokens of a step: with a target, those of the largest graph.

        A step beyond takes a fifth longer at once. Launching it kernel by kernel also keeps the
        executor thread from handing over the results of the step before. Prompts lose little by
        it: on the H200, 8B computes 2 % more tokens of prompts of 2,000 a second, and 8 % less of
        30,000, than in steps of 8,192.
        """
        most, sizes = self.limits.max_num_batched_tokens, self.limits.step_sizes
        if not (sizes and self.limits.itl_target):
            return most
        return min(most, max(sizes[-1], num_decodes + sizes[-1] // 2))

    def _target(self) -> float:
        """The seconds that a step with decode rows may take; more while many prompts wait.

        Not while deadlines wait: the longer steps would make others miss theirs.
        """
        begun = sum(self.batch.remaining(seq)[1] for seq in self.batch.prefilling.values())
        backlog = self.forecast.prefill_seconds(self.admission.waiting.queue.num_left + begun)
        longer = backlog > BACKLOG_SECONDS and not self.admission.waiting.queue.num_timely
        return self.limits.itl_target * (BACKLOG_TARGET if longer else 1.0)

    def _fill_share(self, step: Step, room: PrefillRoom, now: float) -> None:
        """Give prompts that are shorter than the one whose turn it is their share of the step."""
        if len(self.batch.prefilling) + len(self.admission.waiting.queue) < 2:
            return
        prefilling = self.batch.prefilling.values()
        candidates = [self.admission.head(self.batch.num_free), *prefilling]
        first = min((seq for seq in candidates if seq is not None), key=self._turn, default=None)
        if first is None or self.policy.short_rank(first.service, first.service.num_left) is None:
            return
        share = room.split(SHORT_SHARE)
        self._fill(step, share, now, self._short_turn, self.admission.head_short, until=first)
        room.merge(share)

    def _fill(
        self,
        step: Step,
        room: PrefillRoom,
        now: float,
        turn: Callable[[Sequence], tuple[float, ...]],
        head: Callable[[int], Sequence | None],
        until: Sequence | None = None,
    ) -> None:
        """Add chunks of prompts in the order of ``turn``, until the room is full.

        A sequence gets at most one chunk of a step.

        Args:
            head: the waiting sequence to enter next, given the number of free slots.
            until: only those before this one.
        """
        begun = {chunk.seq.id for chunk in step.chunks}
        mine = sorted(
            (seq for seq in self.batch.prefilling.values() if seq.id not in begun), key=turn
        )
        _by_deadline(mine)
        mine.reverse()  # popped from the end, equals keep their order
        fits = True
        while fits and room.tokens > 0:
            waiting = head(self.batch.num_free) if step.admits_more else None
            enters = waiting is not None and (not mine or _first(waiting, mine[-1], turn))
            seq = waiting if enters else mine.pop() if mine else None
            if seq is None or (until is not None and turn(seq) >= turn(until)):
                break
            if enters:
                fits = self._admit(seq, step, room, now, short=until is not None)
            else:
                fits = self._add_chunk(seq, step, room, now)

    def _turn(self, seq: Sequence) -> tuple[float, float, float]:
        """The order in which prompts get chunks: least served account first, then by rank."""
        self._measure(seq)
        rank = self.policy.rank(seq.service, seq.service.num_left)
        return self.admission.waiting.queue.shares.served(seq), seq.place.turn, rank

    def _short_turn(self, seq: Sequence) -> tuple[float, float]:
        """The order in the share for short prompts."""
        self._measure(seq)
        rank = self.policy.short_rank(seq.service, seq.service.num_left)
        return self.admission.waiting.queue.shares.served(seq), math.inf if rank is None else rank

    def _measure(self, seq: Sequence) -> None:
        """Note what is left to be prefilled of a sequence that has begun."""
        if seq.slot >= 0:
            start, seq.service.num_left = self.batch.remaining(seq)
            seq.service.prefill_seconds = self.forecast.prefill_seconds(seq.service.num_left, start)

    def _admit(
        self, seq: Sequence, step: Step, room: PrefillRoom, now: float, *, short: bool
    ) -> bool:
        """Try the head of the queue; False when the step is full."""
        entry = self.admission.admit(seq, room, short=short)
        if entry is not Entry.ADMITTED:
            if seq.state is SeqState.LOADING:
                seq.timeline.note(now, step.number, "loading", self.copies.pages_for(seq))
            elif seq not in self.admission.waiting.queue and not self.copies.is_for(seq):
                seq.timeline.note(now, step.number, "shares")
                step.add_cost(seq.kv.known.depth if seq.kv.known is not None else 0)
            return entry is Entry.WAITS
        cached = seq.kv.num_shared * self.limits.page_size
        seq.state = SeqState.RUNNING
        if seq.num_cached < 0:
            seq.num_cached = cached
        self.batch.enter(seq, cached)
        self.states.enter(seq, cached)
        for other in self.admission.waiting.queue.some(MOST_COMPARED):
            self.states.expect(seq, cached, other)
        seq.timeline.note(now, step.number, "admitted", seq.slot, cached)
        step.admit(seq)
        return self._add_chunk(seq, step, room, now)

    def _add_chunk(self, seq: Sequence, step: Step, room: PrefillRoom, now: float) -> bool:
        """The next chunk of a prompt; False when the step is full."""
        start, remaining = self.batch.remaining(seq)
        wanted = min(remaining, self.limits.prefill_chunk)
        wanted = self.states.limit_chunk(seq, start, wanted)
        if wanted < remaining:
            wanted = self.states.end_of_page(start, wanted)
        fitting = room.fit(start, wanted)
        is_last = fitting < wanted or room.tokens == fitting < remaining
        if is_last and self.times.size_room(room, step.shape, start):
            fitting, is_last = min(wanted, room.tokens), False
        if fitting == 0:
            return False
        q_len = self._unpadded(step, fitting) if is_last else fitting
        if q_len < wanted:
            q_len = self.states.end_of_page(start, q_len)
        room.take(start, q_len)
        end, whole = self.batch.add_chunk(seq, q_len, step.number)
        self.cache.begin(seq.kv, end)
        self.states.chunk_planned(seq, start, end)
        step.add_chunk(Chunk(seq, end, whole), start)
        seq.timeline.note(now, step.number, "chunk", start, q_len)
        return q_len == fitting

    def _unpadded(self, step: Step, q_len: int) -> int:
        """Trim the last chunk to a graph size, unless fewer than MIN_CHUNK tokens remain."""
        sizes, before = self.limits.step_sizes, step.shape.num_tokens
        above = bisect_right(sizes, before + q_len)
        if not 0 < above < len(sizes):
            return q_len
        unpadded = sizes[above - 1] - before
        return unpadded if unpadded >= MIN_CHUNK else q_len


def _first(seq: Sequence, other: Sequence, turn: Callable[[Sequence], tuple[float, ...]]) -> bool:
    """Whether ``seq`` goes before ``other``: by their deadlines, if both have one."""
    timely = seq.service.deadline < FOREVER and other.service.deadline < FOREVER
    if timely and seq.place.account == other.place.account and seq.place.turn == other.place.turn:
        return seq.service.deadline < other.service.deadline
    return turn(seq) < turn(other)


def _by_deadline(seqs: list[Sequence]) -> None:
    """Let those with a deadline change places in their account, the earliest deadline first."""
    places: dict[tuple[str | None, Turn], list[int]] = {}
    for index, seq in enumerate(seqs):
        if seq.service.deadline < FOREVER:
            places.setdefault((seq.place.account, seq.place.turn), []).append(index)
    for indices in places.values():
        timely = sorted((seqs[index] for index in indices), key=lambda seq: seq.service.deadline)
        for index, seq in zip(indices, timely, strict=True):
            seqs[index] = seq
