"""Account: the waiting requests that share one part of the machine, in their orders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncllm.engine.scheduling.sequence import FOREVER, Sequence, Turn
from asyncllm.engine.scheduling.waiting.sorted_work import Entry, SortedWork


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request, and its entries in the account's orders."""

    seq: Sequence
    entry: Entry
    deadline: Entry | None
    short: Entry | None


class Account:
    """Who is next: the request of the smallest (turn, rank); deadlines change that order.

    Each request with a deadline holds a place in the order by rank. The places are filled by the
    earliest deadline first: these requests get as many turns as their ranks give them, and among
    themselves take them in the order that meets most deadlines.

    Attributes:
        served: the cost charged so far.
    """

    __slots__ = ("_deadlines", "_order", "_places", "_short", "_waiting", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self._waiting: dict[int, _Waiting] = {}
        self._order = SortedWork()  # without those that have a deadline
        self._deadlines = SortedWork()
        self._places = SortedWork()  # of those with a deadline
        self._short = SortedWork()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return (waiting.seq for waiting in self._waiting.values())

    def push(self, seq: Sequence, rank: float, short: float | None) -> None:
        """``seq`` joins; ``short`` is its rank among those for the share of short prompts."""
        number, work = seq.id, seq.num_left
        entry = Entry((seq.turn, rank), number, work)
        deadline = short_entry = None
        if seq.turn is Turn.NEW and seq.deadline < FOREVER:
            deadline = Entry((0, seq.deadline), number, work)
            self._deadlines.add(deadline)
            self._places.add(entry)
        else:
            self._order.add(entry)
        if seq.turn is Turn.NEW and short is not None:
            short_entry = Entry((0, short), number, work)
            self._short.add(short_entry)
        self._waiting[seq.id] = _Waiting(seq, entry, deadline, short_entry)

    def remove(self, seq: Sequence, *, served: bool) -> Entry:
        """``seq`` leaves; returns the entry that ``push`` made of it.

        If it has a deadline and is ``served``, it takes the first of the places held.
        """
        waiting = self._waiting.pop(seq.id)
        if waiting.deadline is None:
            self._order.remove(waiting.entry)
        else:
            self._deadlines.remove(waiting.deadline)
            place = self._places.first() if served else self._places.at_or_after(waiting.entry)
            assert place is not None, "there are as many places as deadlines"
            self._places.remove(place)
        if waiting.short is not None:
            self._short.remove(waiting.short)
        return waiting.entry

    def peek(self) -> Sequence | None:
        """The next request; None when none waits."""
        first, place = self._order.first(), self._places.first()
        if place is not None and (first is None or place < first):
            first = self._deadlines.first()
        return None if first is None else self._waiting[first.number].seq

    def by_deadline(self) -> Iterator[Sequence]:
        """Those with a deadline that were not admitted before, the earliest first."""
        return (self._waiting[entry.number].seq for entry in self._deadlines)

    def peek_short(self) -> Sequence | None:
        """The first for the share of short prompts; None when there is none."""
        first = self._short.first()
        return None if first is None else self._waiting[first.number].seq

    def ahead_of(self, seq: Sequence, rank: float) -> tuple[int, int]:
        """Requests that are surely served before a newcomer with a deadline, and their tokens."""
        place, first = Entry((seq.turn, rank), seq.id, 0), self._places.first()
        requests, tokens = self._order.before(place if first is None else min(place, first))
        sooner, their_tokens = self._deadlines.before(Entry((0, seq.deadline), seq.id, 0))
        return requests + sooner, tokens + their_tokens

    def num_before(self, seq: Sequence) -> int:
        """About how many of the requests come before ``seq``, which is one of them."""
        waiting = self._waiting[seq.id]
        if waiting.deadline is None:
            timely, _ = self._places.before(waiting.entry)
        else:
            timely, _ = self._deadlines.before(waiting.deadline)
        return timely + self._order.before(waiting.entry)[0]
