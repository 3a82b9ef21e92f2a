"""Admission: which of the requests that wait may enter the batch, and with which pages."""

from __future__ import annotations

import enum

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import FOREVER, Sequence
from asyncllm.engine.scheduling.timing.prefill_room import PrefillRoom
from asyncllm.engine.scheduling.trials import Trials
from asyncllm.engine.scheduling.waiting.deadlines import Deadlines
from asyncllm.engine.scheduling.waiting.growth import Growth, Resident
from asyncllm.engine.scheduling.waiting.placement import Placement
from asyncllm.engine.scheduling.waiting.queue import OUTPUT_COST
from asyncllm.engine.scheduling.waiting.waiting import Waiting

#: The share of the slots, and of the pages, that short prompts may have which overtake others.
SHORT_SHARE = 0.1


class Entry(enum.Enum):
    """What became of the head of the queue."""

    ADMITTED = enum.auto()  # it has its pages and may take a slot
    WAITS = enum.auto()  # for pages, or for its prefix; the next one may be tried
    STEP_FULL = enum.auto()


class ShortShare:
    """Owns who has entered through the share for short prompts, until their pages are given up."""

    def __init__(self, limits: EngineLimits, growth: Growth):
        self._growth = growth
        self._inside: dict[int, Resident] = {}
        self._most = SHORT_SHARE * limits.max_num_seqs
        self._most_pages = SHORT_SHARE * limits.num_pages

    @property
    def is_full(self) -> bool:
        """Whether nobody else may have a slot."""
        return len(self._inside) + 1 > self._most

    def has_pages(self, count: int) -> bool:
        """Whether another ``count`` pages are within the share."""
        taken = sum(resident.expected for resident in self._inside.values())
        return taken + count <= self._most_pages

    def delays(self, expected: int, count: int) -> bool:
        """Whether one who waits for ``expected`` pages waits for ``count`` of a short prompt.

        Not if they are there beside it, or will be while the share for short prompts is full.
        """
        most = self._growth.most - self._most_pages
        return expected > max(most, self._growth.available_beside(count))

    def enter(self, seq: Sequence) -> None:
        """``seq`` has entered, and has its pages."""
        self._inside[seq.id] = self._growth.resident(seq)

    def leave(self, seq: Sequence) -> None:
        """``seq``, if it is inside, gives up its pages."""
        self._inside.pop(seq.id, None)


class Admission:
    """Lets requests in. It owns nothing itself; ``growth`` has the pages promised to them.

    Pages for output are expected, not reserved (``Growth``). When pages run out all the same, the
    scheduler preempts.
    """

    def __init__(
        self,
        limits: EngineLimits,
        cache: KVCacheManager,
        forecast: Forecast,
        copies: PageCopies,
        trials: Trials,
        waiting: Waiting,
        deadlines: Deadlines,
    ):
        self.waiting = waiting
        self.deadlines = deadlines
        self.growth = Growth(cache, forecast)
        self.placement = Placement(cache, copies, self.growth, trials)
        self._queue = waiting.queue
        self._limits = limits
        self._cache = cache
        self._forecast = forecast
        self._copies = copies
        self._trials = trials
        self._short = ShortShare(limits, self.growth)

    def head(self, num_free_slots: int) -> Sequence | None:
        """The sequence to enter next; None when none can."""
        placement = self.placement
        if self._trials.active:
            waiting = (seq for seq in self._trials.group if seq in self._queue)
            seq = next(waiting, None) if num_free_slots else None
            return None if seq is None or placement.is_blocked(seq) else seq
        loaded = self._copies.oldest_loaded
        if loaded is not None:
            return None if placement.still_blocked(loaded) else loaded
        seq = self.deadlines.first_in_time() if self._is_open(num_free_slots) else None
        return None if seq is None or placement.still_blocked(seq) else seq

    def head_short(self, num_free_slots: int) -> Sequence | None:
        """The sequence to enter next through the share for short prompts; None when none can.

        What was begun comes first: nobody overtakes a sequence that was preempted.
        """
        queue = self._queue
        if self._trials.active or queue.num_resumed or self._copies.oldest_loaded is not None:
            return None
        if self._short.is_full or not self._is_open(num_free_slots):
            return None
        seq, head = queue.peek_short(), queue.peek()
        if seq is None or self.placement.still_blocked(seq):
            return None
        pages = self._expected_pages(seq)
        if head is not None and self._short.delays(self._expected_pages(head), pages):
            return None
        timely = seq.service.deadline < FOREVER
        if timely and self.deadlines.misses(seq, self._forecast.expected(seq)):
            return None
        return seq if self._short.has_pages(pages) else None

    def admit(self, seq: Sequence, room: PrefillRoom, *, short: bool = False) -> Entry:
        """Let the head enter, or wait for its prefix.

        Args:
            short: it is the head of the share for short prompts.
        """
        if self._copies.is_for(seq):
            return self._admit_loaded(seq, room)
        left, match = seq.service.num_left, self.waiting.measure(seq)
        if match.pending is not None:
            self.waiting.share(seq, match.pending)
            return Entry.WAITS
        if seq.service.num_left != left and not self._queue.reorder(seq) and not short:
            return Entry.WAITS  # less of it is cached than when it took its place
        load = self.placement.loads(match)
        if not load:
            match = self._cache.states.on_device(match)
        cached = match.node.depth * self._limits.page_size
        if not load and not self._fits(seq, cached, room):
            return Entry.STEP_FULL
        if not self.placement.place(seq, match, load=load):
            return Entry.WAITS
        if short:
            self._short.enter(seq)
        self.waiting.serve(seq, self._expected_cost(seq, cached))
        return Entry.WAITS if load else Entry.ADMITTED

    def make_room(self) -> bool:
        """Send a loaded sequence back to the queue for its pages; False when there is none."""
        seq = self._copies.newest_loaded
        if seq is None:
            return False
        self._forgo(seq)
        self.waiting.push(seq)
        return True

    def drop(self, seq: Sequence) -> None:
        """``seq`` ends while it waits."""
        self.placement.forget(seq)
        if self.deadlines.missed.pop(seq.id, None) is not None:
            return
        if seq in self._queue:
            self.waiting.remove(seq)
        elif self._copies.is_for(seq):
            self._forgo(seq)
        else:
            self.waiting.sharing.ended()

    def explain(self, num_free_slots: int) -> None:
        """A step is planned: note why the head of the queue is not in it."""
        seq, clock = self._queue.peek(), self.waiting.clock
        if seq is None:
            clock.reason = None
        elif num_free_slots <= self._copies.num_loading:
            clock.reason = "slots"
        else:
            clock.reason = "pages" if self.placement.is_blocked(seq) else "budget"

    def pages_soon(self) -> int:
        """Pages that the next steps are about to give to requests that wait."""
        head = self._queue.peek()
        if head is None:
            return 0
        most = min(self._queue.num_left, self._limits.max_num_batched_tokens)
        return self._cache.pages_for(max(head.service.num_left, most))

    def grew(self, seq: Sequence) -> None:
        """A running sequence has taken one page more."""
        if more := self.growth.grew(seq):
            self._queue.shares.charge(seq, OUTPUT_COST * more * self._limits.page_size)

    def settle(self, seq: Sequence, cost: float) -> None:
        """Replace what was charged in advance for its stay in the batch by its real cost."""
        self._short.leave(seq)
        self._queue.shares.charge(seq, cost - seq.place.charged)
        seq.place.charged = 0.0

    def _is_open(self, num_free_slots: int) -> bool:
        # Loading sequences must find a slot.
        return num_free_slots > self._copies.num_loading and not self.waiting.sharing.is_full

    def _admit_loaded(self, seq: Sequence, room: PrefillRoom) -> Entry:
        """Let a sequence enter whose prefix was loaded, or load the next part of it."""
        match = self._cache.match(seq.kv)
        load = match.pending is None and self.placement.loads(match)
        if not load:
            match = self._cache.states.on_device(match)
            if not self._fits(seq, match.node.depth * self._limits.page_size, room):
                return Entry.STEP_FULL
        placed = self.placement.place_loaded(seq, match, load=load)
        if placed is False:
            self.make_room()
        if load or not placed:
            return Entry.WAITS
        self._copies.abandon(seq)
        return Entry.ADMITTED

    def _fits(self, seq: Sequence, cached: int, room: PrefillRoom) -> bool:
        """Whether the step has room for a first chunk."""
        return room.fit(cached, min(len(seq.tokens) - cached, self._limits.prefill_chunk)) > 0

    def _forgo(self, seq: Sequence) -> None:
        """``seq``, loading or loaded, gives its pages up."""
        self._copies.abandon(seq)
        self.growth.leave(seq)
        self.settle(seq, 0.0)
        self._cache.release(seq.kv, 0)

    def _expected_pages(self, seq: Sequence) -> int:
        return self._cache.pages_for(self._forecast.length(seq))

    def _expected_cost(self, seq: Sequence, cached: int) -> float:
        known = len(seq.tokens)
        return known - cached + OUTPUT_COST * (self._forecast.length(seq) - known)
