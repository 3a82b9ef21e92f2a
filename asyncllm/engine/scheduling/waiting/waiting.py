"""Waiting: the requests that have no slot, in the queue or until a prefix of theirs is computed."""

from __future__ import annotations

from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.cache.node import Match, Node, pending_below
from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import SeqState, Sequence, Turn
from asyncllm.engine.scheduling.timeline import WaitClock
from asyncllm.engine.scheduling.waiting.queue import WaitingQueue


class Sharing:
    """Sequences by the last page of the prefix that they wait for, or for the state after it.

    Their number is bounded, because each of them is looked at when its prefix has landed.

    Attributes:
        num_waiting: how many there are.
    """

    def __init__(self, cache: KVCacheManager, most: int):
        self._page_size = cache.page_size
        self._most = most
        self.num_waiting = 0
        self._by_page: dict[Node, list[Sequence]] = {}

    @property
    def is_full(self) -> bool:
        return self.num_waiting >= self._most

    def add(self, seq: Sequence, page: Node) -> None:
        """``seq`` waits until ``page`` is settled."""
        self._by_page.setdefault(page, []).append(seq)
        self.num_waiting += 1

    def ended(self) -> None:
        """One of the sequences has ended; it is forgotten with its page."""
        self.num_waiting -= 1

    def page_of(self, seq: Sequence) -> Node | None:
        """What ``seq`` waits for; None when it is not one of these."""
        return next((page for page, seqs in self._by_page.items() if seq in seqs), None)

    def take_done(self) -> list[Sequence]:
        """The sequences whose prefix has been computed, or will not be: they wait here no more."""
        done: list[Sequence] = []
        for page in [page for page in self._by_page if page.settled or not page.linked]:
            for seq in self._by_page.pop(page):
                if seq.state is not SeqState.WAITING:
                    continue  # it has ended
                more = pending_below(page, seq.kv.tokens, self._page_size)
                if more is not None:  # the next chunk is already being computed
                    self._by_page.setdefault(more, []).append(seq)
                else:
                    self.num_waiting -= 1
                    done.append(seq)
        return done


class Waiting:
    """Owns the queue, and those that share a prefix which another computes.

    Attributes:
        clock: how long the queue has waited, and for what.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        policy: Policy,
        forecast: Forecast,
        copies: PageCopies,
        most_sharing: int,
    ):
        self.queue = WaitingQueue(policy)
        self.sharing = Sharing(cache, most_sharing)
        self.clock = WaitClock()
        self._cache = cache
        self._forecast = forecast
        self._copies = copies

    def __len__(self) -> int:
        """Requests in the queue, and those that wait for their prefix."""
        return len(self.queue) + self.sharing.num_waiting + self._copies.num_loading

    def push(self, seq: Sequence) -> None:
        """``seq`` joins the queue, at the place that the policy gives it."""
        seq.timeline.wait_from(self.clock)
        self.measure(seq)
        seq.place.turn = Turn.NEW if seq.num_cached < 0 else Turn.RESUMED
        self.queue.push(seq)

    def measure(self, seq: Sequence) -> Match:
        """Look up what is cached of ``seq``, and note what is left to be prefilled."""
        match = self._cache.match(seq.kv, seq.reads.done + 1 if seq.reads.pending else None)
        cached = match.num_known * self._cache.page_size
        service = seq.service
        service.num_left = len(seq.tokens) - cached
        service.prefill_seconds = self._forecast.prefill_seconds(service.num_left, cached)
        return match

    def remove(self, seq: Sequence) -> None:
        """``seq`` leaves the queue, not to be served now."""
        seq.timeline.wait_until()
        self.queue.remove(seq)

    def serve(self, seq: Sequence, cost: float) -> None:
        """``seq`` leaves the queue to be served."""
        self.queue.serve(seq, cost)
        seq.timeline.wait_until()

    def share(self, seq: Sequence, page: Node) -> None:
        """``seq`` leaves the queue until ``page``, of its prefix, is written."""
        self.remove(seq)
        self.sharing.add(seq, page)

    def stop_sharing(self) -> None:
        """Sequences whose prefix has been computed, or will not be, rejoin the queue."""
        if self.sharing.num_waiting:
            for seq in self.sharing.take_done():
                self.push(seq)
