"""Sharing: the requests that wait for a prefix which another one is computing."""

from __future__ import annotations

from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.cache.node import Node
from asyncllm.engine.scheduling.sequence import SeqState, Sequence


class Sharing:
    """Sequences by the last page of the prefix that they wait for.

    Their number is bounded, because each of them is looked at when its prefix has landed.

    Attributes:
        num_waiting: how many there are.
    """

    def __init__(self, cache: KVCacheManager, most: int):
        self._cache = cache
        self._most = most
        self.num_waiting = 0
        self._by_page: dict[Node, list[Sequence]] = {}

    @property
    def is_full(self) -> bool:
        return self.num_waiting >= self._most

    def add(self, seq: Sequence, page: Node) -> None:
        """``seq`` waits until ``page`` is written."""
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
        for page in [page for page in self._by_page if page.ready or not page.linked]:
            for seq in self._by_page.pop(page):
                if seq.state is not SeqState.WAITING:
                    continue  # it has ended
                more = self._cache.pending_below(seq, page)
                if more is not None:  # the next chunk is already being computed
                    self._by_page.setdefault(more, []).append(seq)
                else:
                    self.num_waiting -= 1
                    done.append(seq)
        return done
