"""RunningBatch: how far each running sequence is, as columns over slots.

A step touches every running row, so this part of the scheduler works on arrays: a few numpy calls
make the decode rows of a step, however many there are.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.scheduling.sequence import Sequence

Ints = npt.NDArray[np.int32]


#: A running sequence had its last row that many steps ago, or nothing is known of it any more.
AHEAD_STEPS: Final = 8


class Progress(NamedTuple):
    """How far a sequence with a slot is.

    Attributes:
        computed: positions that are computed or in flight.
        prompt_left: tokens known at admission that still have to be prefilled.
        own_pages: its pages that it did not find in the prefix cache.
        prefix_page: the first page of what it found there; -1 when it found nothing.
    """

    computed: int
    prompt_left: int
    own_pages: int
    prefix_page: int


class RunningBatch:
    """Sequences with a slot. Positions ``0 .. computed-1`` are computed or in flight.

    Attributes:
        sequences: by slot; kept until the slot is free again.
        computed: int32 [slots]; where the next row starts, if all drafts in flight are right.
        doubt: int32 [slots]; the drafted tokens in flight.
        first: int32 [slots]; the first position that was not cached at admission.
        known: int32 [slots]; tokens known at admission. Positions before are prefilled in chunks,
            each later one is a decode row.
        stop_at: int32 [slots]; the position of the last token, which is never computed.
        capacity: int32 [slots]; positions that the pages have room for.
        last_step: int64 [slots]; the newest step with a row of the sequence. While that is in
            flight, the sequence keeps slot and pages.
        running: those that have not left, by id.
        decoding: sequences with a decode row in every step, in the order of the rows.
        prefilling: sequences with prompt chunks still to be planned, in order of admission.
        paused: sequences that get no row before their rows in flight are done: those that a draft
            in flight may bring to their end, and those that wait for a draft.
        keep_at: int32 [slots]; see ``States.positions``; None without.
        ahead: how many tokens a head drafts after each of the latest steps; 0 if not named.
    """

    def __init__(self, num_slots: int, page_size: int):
        self.page_size = page_size
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.computed = np.zeros(num_slots, dtype=np.int32)
        self.doubt = np.zeros(num_slots, dtype=np.int32)
        self.first = np.zeros(num_slots, dtype=np.int32)
        self.known = np.zeros(num_slots, dtype=np.int32)
        self.stop_at = np.zeros(num_slots, dtype=np.int32)
        self.capacity = np.zeros(num_slots, dtype=np.int32)
        self.last_step = np.full(num_slots, -1, dtype=np.int64)
        self.running: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.paused: dict[int, Sequence] = {}
        self.keep_at: Ints | None = None
        self.ahead: dict[int, int] = {}
        self._decoding: dict[int, Sequence] = {}
        self._free: list[int] = []
        self.reset()
        # The decode rows as an array and a list, made anew when they change: steps in flight keep
        # the old list.
        self._slots: Ints | None = None
        self.decoding: list[Sequence] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return len(self.sequences) - len(self._free)

    def reset(self) -> None:
        """All slots are free; nothing may run."""
        num_slots = len(self.sequences)
        self.sequences = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def enter(self, seq: Sequence, num_computed: int) -> None:
        """``seq`` takes a slot, to be prefilled from position ``num_computed`` on."""
        seq.slot = slot = self._free.pop()
        self.sequences[slot] = seq
        self.computed[slot] = self.first[slot] = num_computed
        self.doubt[slot] = 0
        self.known[slot] = len(seq.tokens)
        self.stop_at[slot] = seq.output.max_length - 1
        self.capacity[slot] = len(seq.kv.pages) * self.page_size
        self.last_step[slot] = -1
        self.running[seq.id] = self.prefilling[seq.id] = seq

    def leave(self, seq: Sequence) -> None:
        """``seq`` runs no more; it keeps its slot."""
        del self.running[seq.id]
        self.stop(seq)

    def stop(self, seq: Sequence) -> None:
        """Plan no more rows of ``seq``; it keeps its slot."""
        self.prefilling.pop(seq.id, None)
        self.paused.pop(seq.id, None)
        if self._decoding.pop(seq.id, None) is not None:
            self._slots = None

    def pause(self, seq: Sequence) -> None:
        """Plan no row of ``seq``, which is decoding, before its rows in flight are done."""
        self.stop(seq)
        self.paused[seq.id] = seq

    def resume(self, step: int) -> None:
        """This step is done: whoever is paused and has no row in a later one goes on."""
        for seq in [*self.paused.values()]:
            if self.last_step[seq.slot] <= step:
                del self.paused[seq.id]
                if self.computed[seq.slot] < self.stop_at[seq.slot]:
                    self._decoding[seq.id] = seq
                    self._slots = None

    def vacate(self, seq: Sequence) -> None:
        """The slot is free again."""
        self.sequences[seq.slot] = None
        self._free.append(seq.slot)
        seq.slot = -1

    def slots(self) -> Ints:
        """Slots of ``decoding``; int32 [rows]."""
        if self._slots is None:
            self.decoding = list(self._decoding.values())
            self._slots = np.array([seq.slot for seq in self.decoding], dtype=np.int32)
        return self._slots

    def grown(self, seq: Sequence) -> None:
        """``seq`` has more pages."""
        self.capacity[seq.slot] = len(seq.kv.pages) * self.page_size

    def drafts_ahead(self, step: int, count: int) -> None:
        """After this step, a head drafts so many tokens of each sequence that has a row in it."""
        if count or self.ahead:
            self.ahead = {old: n for old, n in self.ahead.items() if old > step - AHEAD_STEPS}
            self.ahead[step] = count

    def num_drafted(self, seq: Sequence) -> int:
        """How many tokens a head has drafted, or will have, to follow the last row of ``seq``."""
        return self.ahead.get(int(self.last_step[seq.slot]), 0)

    def most_drafts(self, seq: Sequence) -> int:
        """The most tokens of a draft: up to its end, and to where its state is kept."""
        slot = seq.slot
        start, end = int(self.computed[slot]), int(self.stop_at[slot])
        if self.keep_at is not None:
            end = min(end, int(self.keep_at[slot]))
        return end - start - 1

    def remaining(self, seq: Sequence) -> tuple[int, int]:
        """The first prompt position still to be computed, and how many there are."""
        start = int(self.computed[seq.slot])
        return start, int(self.known[seq.slot]) - start

    def work(self, seq: Sequence) -> tuple[int, int, int]:
        """Known tokens computed; positions computed and tokens generated since admission."""
        slot = seq.slot
        computed = int(self.computed[slot])
        generated = len(seq.tokens) - int(self.known[slot])
        return min(computed, len(seq.tokens)), computed - int(self.first[slot]), generated

    def num_done(self, seq: Sequence) -> int:
        """Positions whose steps are known to be done: those before the last sampled token."""
        generated = len(seq.tokens) - int(self.known[seq.slot])
        return len(seq.tokens) - 1 if generated else 0

    def progress(self, seq: Sequence) -> Progress:
        """How far a sequence with a slot is."""
        start, left = self.remaining(seq)
        found = int(self.first[seq.slot]) // self.page_size
        prefix = seq.kv.pages[0] if found and seq.kv.pages else -1
        return Progress(start, max(0, left), max(0, len(seq.kv.pages) - found), prefix)

    def add_chunk(self, seq: Sequence, q_len: int, step: int) -> tuple[int, bool]:
        """Plan a prompt chunk; returns the position after it, and whether the prompt ends there."""
        slot = seq.slot
        end = int(self.computed[slot]) + q_len
        self.computed[slot] = end
        self.last_step[slot] = step
        whole = end == self.known[slot]
        if whole:
            del self.prefilling[seq.id]
            if end < self.stop_at[slot]:
                self._decoding[seq.id] = seq
                self._slots = None
        return end, whole

    def add_decodes(self, slots: Ints, positions: Ints, step: int, decode_steps: int = 1) -> None:
        """Plan a decode row at ``positions`` for each of ``slots``; both int32 [rows].

        Args:
            decode_steps: tokens that each row yields; none passes the end of its sequence.
        """
        after = positions + decode_steps
        self.computed[slots] = after
        self.last_step[slots] = step
        ended = after >= self.stop_at[slots]
        if ended.any():
            for slot in slots[ended].tolist():
                seq = self.sequences[slot]
                assert seq is not None, "a row has a sequence"
                self._reach_end(seq)

    def add_draft(self, seq: Sequence, num_drafted: int, step: int) -> None:
        """Plan a row that verifies so many drafted tokens, which are right until it is done."""
        slot = seq.slot
        self.computed[slot] += 1 + num_drafted
        self.doubt[slot] += num_drafted
        self.last_step[slot] = step
        if self.computed[slot] >= self.stop_at[slot]:
            self._reach_end(seq)

    def verified(self, seq: Sequence, num_drafted: int, num_right: int) -> None:
        """The row is done, and so many of its drafted tokens were right."""
        self.computed[seq.slot] -= num_drafted - num_right
        self.doubt[seq.slot] -= num_drafted

    def _reach_end(self, seq: Sequence) -> None:
        """No row of ``seq`` is left to plan, if all drafts in flight are right."""
        if self.doubt[seq.slot]:
            self.pause(seq)
        else:
            self.stop(seq)


class LeakCheck:
    """Whether every KV page and every slot is accounted for.

    Only to be asked while no sequence is running or waiting, and no step or copy is under way.

    Then all slots are free, and each page is free or cached. Checking compares a few counts, in
    about 2 us whatever the size of the cache, so it may be done whenever the engine becomes idle.
    """

    def __init__(self, cache: KVCacheManager, batch: RunningBatch):
        self._cache = cache
        self._batch = batch

    def mismatch(self) -> str | None:
        """What does not add up; None if all is well."""
        cache, batch = self._cache, self._batch
        held = cache.num_in_use or batch.num_taken or cache.states.num_taken
        if not held and cache.pins.num_pages <= cache.num_cached:
            return None
        return (
            f"of {cache.num_pages} pages, {cache.num_free} are free, {cache.num_cached} cached and "
            f"{cache.num_in_use} held by nobody; {cache.pins.num_pages} are pinned; "
            f"{batch.num_taken} slots and {cache.states.num_taken} states are taken by nobody"
        )

    def heal(self) -> None:
        """Free all pages and slots. What was cached is forgotten: a page may be in two places."""
        self._cache.reset()
        self._batch.reset()
