"""Deadlines: who in the queue is too late for its own, and who makes way so that others are not."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice

from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import FOREVER, Sequence, Turn
from asyncllm.engine.scheduling.waiting.waiting import Waiting

#: Requests at the head of the queue whose deadlines one plan looks at, at most.
MOST_JUDGED = 64
#: Requests of an account that are looked at, at most, to find the deadlines to give up.
MOST_COMPARED = 128


class Deadlines:
    """Owns who misses its deadline, and who makes way.

    Attributes:
        missed: by id, requests that left the queue, too late for their deadline, until they end.
    """

    def __init__(self, waiting: Waiting, forecast: Forecast):
        self.missed: dict[int, Sequence] = {}
        self._waiting = waiting
        self._forecast = forecast
        self._now = 0.0
        #: By account, those whose deadlines the present plan gives up.
        self._given_up: dict[str, set[int]] = {}

    def advance_clock(self, now: float) -> None:
        """What was found out for the last plan may have changed."""
        self._now, self._given_up = now, {}

    def misses(self, seq: Sequence, seconds: float) -> bool:
        """Whether ``seq``, taking that long from now on, misses its deadline."""
        return self._now + seconds > seq.service.deadline

    def first_in_time(self) -> Sequence | None:
        """The head of the queue, after those who will miss their deadline have made way."""
        queue = self._waiting.queue
        for _ in range(MOST_JUDGED):
            seq = queue.peek()
            if seq is None or seq.service.deadline == FOREVER:
                return seq
            if self.misses(seq, self._forecast.least(seq)):
                self._waiting.remove(seq)  # for good; the caller of the scheduler ends it
                self.missed[seq.id] = seq
            elif seq.place.turn is Turn.NEW and self._gives_up(seq):
                seq.place.turn = Turn.LATE
                queue.reorder(seq)
            else:
                return seq
        return queue.peek()

    def _gives_up(self, head: Sequence) -> bool:
        """Whether the head makes way, so that most of its account can be in time."""
        account, queue = head.place.account or "", self._waiting.queue
        if account not in self._given_up:
            seqs = islice(queue.by_deadline(head), MOST_COMPARED)
            pace = float(queue.shares.num_active)
            self._given_up[account] = given_up(seqs, self._now, self._forecast, pace)
        return head.id in self._given_up[account]


def given_up(seqs: Iterable[Sequence], now: float, forecast: Forecast, pace: float) -> set[int]:
    """The ids of the fewest requests without which all others meet their deadline.

    Prompts are computed one after the other. Whenever one of them would be late, the longest up to
    there is given up: Moore, An n job, one machine sequencing algorithm for minimizing the number
    of late jobs (Management Science 15, 1968).

    Args:
        seqs: the earliest deadline first.
        pace: how many times longer than by itself each prompt takes, as others have their share.
    """
    chosen: list[tuple[float, int]] = []  # (-seconds, id)
    dropped: set[int] = set()
    for seq in seqs:
        seconds = pace * forecast.turn_seconds(seq)
        now += seconds
        heappush(chosen, (-seconds, seq.id))
        if now + forecast.output_seconds(seq) > seq.service.deadline:
            longest, id = heappop(chosen)
            now += longest
            dropped.add(id)
    return dropped
