"""Admission: which requests wait, for what, and which may enter the batch."""

from __future__ import annotations

import enum
from itertools import islice

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.cache.node import Match
from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.forecast import Forecast, given_up
from asyncllm.engine.scheduling.growth import Growth, Resident
from asyncllm.engine.scheduling.sequence import FOREVER, SeqState, Sequence, Turn
from asyncllm.engine.scheduling.timeline import WaitClock
from asyncllm.engine.scheduling.timing.prefill_room import PrefillRoom
from asyncllm.engine.scheduling.trials import Trials
from asyncllm.engine.scheduling.waiting.placement import Placement, Sharing
from asyncllm.engine.scheduling.waiting.queue import OUTPUT_COST, WaitingQueue
from asyncllm.engine.scheduling.waiting.reason import Reason, Wait

#: The share of the slots, and of the pages, that short prompts may have which overtake others.
SHORT_SHARE = 0.1
#: Requests at the head of the queue whose deadlines one plan looks at, at most.
MOST_JUDGED = 64
#: Requests of an account that are looked at, at most, to find the deadlines to give up.
MOST_COMPARED = 128


class Entry(enum.Enum):
    """What became of the head of the queue."""

    ADMITTED = enum.auto()  # it has its pages and may take a slot
    WAITS = enum.auto()  # for pages, or for its prefix; the next one may be tried
    STEP_FULL = enum.auto()


class Admission:
    """Owns the waiting queue, and the pages promised to sequences that left it.

    Pages for output are expected, not reserved (``Growth``). When pages run out all the same, the
    scheduler preempts.

    Attributes:
        missed: by id, requests that left the queue, too late for their deadline, until they end.
    """

    def __init__(
        self,
        limits: EngineLimits,
        cache: KVCacheManager,
        policy: Policy,
        forecast: Forecast,
        copies: PageCopies,
        trials: Trials,
    ):
        self.queue = WaitingQueue(policy)
        self.missed: dict[int, Sequence] = {}
        self._now = 0.0
        self._limits = limits
        self._cache = cache
        self._forecast = forecast
        self._copies = copies
        self._trials = trials
        self._sharing = Sharing(cache, limits.max_num_seqs)
        self._growth = Growth(cache, forecast)
        self._placement = Placement(cache, copies, self._growth, trials)
        #: Sequences with pages that entered through the share for short prompts.
        self._short: dict[int, Resident] = {}
        #: By account, those whose deadlines the present plan gives up.
        self._given_up: dict[str, set[int]] = {}
        self._waits = WaitClock()

    # -- waiting ---------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that wait for their prefix."""
        return len(self.queue) + self._sharing.num_waiting + self._copies.num_loading

    def push(self, seq: Sequence) -> None:
        """``seq`` joins the queue, at the place that the policy gives it."""
        seq.timeline.wait_from(self._waits)
        self.measure(seq)
        seq.place.turn = Turn.NEW if seq.num_cached < 0 else Turn.RESUMED
        self.queue.push(seq)

    def measure(self, seq: Sequence) -> Match:
        """Look up what is cached of ``seq``, and note what is left to be prefilled."""
        match = self._cache.match(seq.kv, seq.reads.done + 1 if seq.reads.pending else None)
        cached = match.num_known * self._limits.page_size
        seq.service.num_left = len(seq.tokens) - cached
        seq.service.prefill_seconds = self._forecast.prefill_seconds(seq.service.num_left, cached)
        return match

    def wait_seconds(self, ahead: tuple[int, int], num_free_slots: int, num_running: int) -> float:
        """Estimated seconds to a newcomer's first step, with (requests, tokens) ``ahead``."""
        # What the last plan noted: a question must not touch what plans depend on.
        if self._waits.reason == "pages":
            return self._forecast.wait(*ahead, 0, num_running)  # pages are scarcer than slots
        return self._forecast.wait(*ahead, num_free_slots, self._limits.max_num_seqs)

    def advance_clock(self, now: float) -> None:
        """Account for the time since the last call: the waits, and pins that expire."""
        self._now, self._given_up = now, {}
        self._waits.advance_clock(now)
        self._cache.expire_pins(now)

    def pages_soon(self) -> int:
        """Pages that the next steps are about to give to requests that wait."""
        head = self.queue.peek()
        if head is None:
            return 0
        most = min(self.queue.num_left, self._limits.max_num_batched_tokens)
        return self._cache.pages_for(max(head.service.num_left, most))

    def explain(self, num_free_slots: int) -> None:
        """A step is planned: note why the head of the queue is not in it."""
        seq = self.queue.peek()
        if seq is None:
            self._waits.reason = None
        elif num_free_slots <= self._copies.num_loading:
            self._waits.reason = "slots"
        else:
            self._waits.reason = "pages" if self._placement.is_blocked(seq) else "budget"

    def why(self, seq: Sequence) -> Wait:
        """Why a waiting sequence has not entered; asking changes nothing."""
        if seq in self.queue:
            reason: Reason = "trial" if self._trials.active else self._waits.reason or "step"
            needs = self._cache.pages_for(self._forecast.length(seq))
            available = max(0, self._growth.available)
            return Wait(reason, self.queue.num_before(seq), needs, available)
        if (page := self._sharing.page_of(seq)) is not None:
            return Wait("prefix", page=page.page, prefix_pages=page.depth)
        if seq.id in self.missed:
            return Wait("deadline")
        if self._copies.is_for(seq):
            return Wait("host" if seq.state is SeqState.LOADING else "budget")
        return Wait("preempted")

    def drop(self, seq: Sequence) -> None:
        """``seq`` ends while it waits."""
        self._placement.forget(seq)
        if self.missed.pop(seq.id, None) is not None:
            return
        if seq in self.queue:
            seq.timeline.wait_until()
            self.queue.remove(seq)
        elif self._copies.is_for(seq):
            self._forgo(seq)
        else:
            self._sharing.ended()

    def stop_sharing(self) -> None:
        """Sequences whose prefix has been computed, or will not be, rejoin the queue."""
        if self._sharing.num_waiting:
            for seq in self._sharing.take_done():
                self.push(seq)

    # -- entering --------------------------------------------------------------------------------

    def head(self, num_free_slots: int) -> Sequence | None:
        """The sequence to enter next; None when none can."""
        if self._trials.active:
            waiting = (seq for seq in self._trials.group if seq in self.queue)
            seq = next(waiting, None) if num_free_slots else None
            return None if seq is None or self._placement.is_blocked(seq) else seq
        loaded = self._copies.oldest_loaded
        if loaded is not None:
            return None if self._placement.still_blocked(loaded) else loaded
        seq = self._first_in_time() if self._is_open(num_free_slots) else None
        return None if seq is None or self._placement.still_blocked(seq) else seq

    def head_short(self, num_free_slots: int) -> Sequence | None:
        """The sequence to enter next through the share for short prompts; None when none can.

        What was begun comes first: nobody overtakes a sequence that was preempted.
        """
        if self._trials.active or self.queue.num_resumed or self._copies.oldest_loaded is not None:
            return None
        full = len(self._short) + 1 > SHORT_SHARE * self._limits.max_num_seqs
        if full or not self._is_open(num_free_slots):
            return None
        seq, head = self.queue.peek_short(), self.queue.peek()
        if seq is None or self._placement.still_blocked(seq):
            return None
        expected = self._cache.pages_for(self._forecast.length(seq))
        if head is not None and self._waits_for(head, expected):
            return None
        if seq.service.deadline < FOREVER and self._misses(seq, self._forecast.expected(seq)):
            return None
        taken = sum(other.expected for other in self._short.values())
        return seq if taken + expected <= SHORT_SHARE * self._limits.num_pages else None

    def _is_open(self, num_free_slots: int) -> bool:
        # Loading sequences must find a slot.
        return num_free_slots > self._copies.num_loading and not self._sharing.is_full

    def _waits_for(self, seq: Sequence, count: int) -> bool:
        """Whether ``seq`` waits for pages that a short prompt of ``count`` pages keeps from it.

        Not if they are there beside it, or will be while the share for short prompts is full.
        """
        most = self._growth.most - SHORT_SHARE * self._limits.num_pages
        expected = self._cache.pages_for(self._forecast.length(seq))
        return expected > max(most, self._growth.available_beside(count))

    def _first_in_time(self) -> Sequence | None:
        """The head of the queue, after those who will miss their deadline have made way."""
        for _ in range(MOST_JUDGED):
            seq = self.queue.peek()
            if seq is None or seq.service.deadline == FOREVER:
                return seq
            if self._misses(seq, self._forecast.least(seq)):
                self._miss(seq)
            elif seq.place.turn is Turn.NEW and self._gives_up(seq):
                seq.place.turn = Turn.LATE
                self.queue.reorder(seq)
            else:
                return seq
        return self.queue.peek()

    def _gives_up(self, head: Sequence) -> bool:
        """Whether the head makes way, so that most of its account can be in time."""
        account = head.place.account or ""
        if account not in self._given_up:
            seqs = islice(self.queue.by_deadline(head), MOST_COMPARED)
            pace = float(self.queue.num_active)
            self._given_up[account] = given_up(seqs, self._now, self._forecast, pace)
        return head.id in self._given_up[account]

    def _miss(self, seq: Sequence) -> None:
        """``seq`` leaves the queue for good; the caller ends it."""
        seq.timeline.wait_until()
        self.queue.remove(seq)
        self.missed[seq.id] = seq

    def _misses(self, seq: Sequence, seconds: float) -> bool:
        """Whether ``seq``, taking that long from now on, misses its deadline."""
        return self._now + seconds > seq.service.deadline

    def admit(self, seq: Sequence, room: PrefillRoom, *, short: bool = False) -> Entry:
        """Let the head enter, or wait for its prefix.

        Args:
            short: it is the head of the share for short prompts.
        """
        if self._copies.is_for(seq):
            return self._admit_loaded(seq, room)
        left, match = seq.service.num_left, self.measure(seq)
        if match.pending is not None:
            self.queue.remove(seq)
            seq.timeline.wait_until()
            self._sharing.add(seq, match.pending)
            return Entry.WAITS
        if seq.service.num_left != left and not self.queue.reorder(seq) and not short:
            return Entry.WAITS  # less of it is cached than when it took its place
        load = self._placement.loads(match)
        cached = match.node.depth * self._limits.page_size
        if not load and not self._fits(seq, cached, room):
            return Entry.STEP_FULL
        if not self._placement.place(seq, match, load=load):
            return Entry.WAITS
        if short:
            self._short[seq.id] = self._growth.resident(seq)
        self.queue.serve(seq, self._expected_cost(seq, cached))
        seq.timeline.wait_until()
        return Entry.WAITS if load else Entry.ADMITTED

    def make_room(self) -> bool:
        """Send a loaded sequence back to the queue for its pages; False when there is none."""
        seq = self._copies.newest_loaded
        if seq is None:
            return False
        self._forgo(seq)
        self.push(seq)
        return True

    def grew(self, seq: Sequence) -> None:
        """A running sequence has taken one page more."""
        if more := self._growth.grew(seq):
            self.queue.charge(seq, OUTPUT_COST * more * self._limits.page_size)

    def left(self, seq: Sequence) -> None:
        """``seq`` leaves the batch, and with it the pages promised to it."""
        self._growth.leave(seq)

    def settle(self, seq: Sequence, cost: float) -> None:
        """Replace what was charged in advance for its stay in the batch by its real cost."""
        self._short.pop(seq.id, None)
        self.queue.charge(seq, cost - seq.place.charged)
        seq.place.charged = 0.0

    def _admit_loaded(self, seq: Sequence, room: PrefillRoom) -> Entry:
        """Let a sequence enter whose prefix was loaded, or load the next part of it."""
        match = self._cache.match(seq.kv)
        load = match.pending is None and self._placement.loads(match)
        if not load and not self._fits(seq, len(seq.kv.pages) * self._limits.page_size, room):
            return Entry.STEP_FULL
        placed = self._placement.place_loaded(seq, match, load=load)
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
        self.left(seq)
        self.settle(seq, 0.0)
        self._cache.release(seq.kv, 0)

    def _expected_cost(self, seq: Sequence, cached: int) -> float:
        known = len(seq.tokens)
        return known - cached + OUTPUT_COST * (self._forecast.length(seq) - known)
