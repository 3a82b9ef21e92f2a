"""A heap whose entries may become stale: they are skipped when they come up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """Items by rank, smallest first, first pushed first among equals.

    ``current(rank, item)`` tells whether an entry still counts, so an item is removed, or gets
    another rank, without a search. Everything is O(log n), amortised: there are at most twice as
    many entries as ever counted at once, plus 64.
    """

    def __init__(self, current: Callable[[float, T], bool]):
        self._current = current
        self._entries: list[tuple[float, int, T]] = []
        self._pushed = 0
        self._tidy_at = 64

    def push(self, rank: float, item: T) -> None:
        self._pushed += 1
        heappush(self._entries, (rank, self._pushed, item))
        if len(self._entries) > self._tidy_at:
            self._entries = [e for e in self._entries if self._current(e[0], e[2])]
            heapify(self._entries)
            self._tidy_at = 2 * len(self._entries) + 64

    def __iter__(self) -> Iterator[tuple[float, T]]:
        """Ranks and items in any order; an item may come more than once."""
        return ((rank, item) for rank, _, item in self._entries if self._current(rank, item))

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()

    def peek(self) -> T | None:
        """The first item; None when there is none."""
        while self._entries:
            rank, _, item = self._entries[0]
            if self._current(rank, item):
                return item
            heappop(self._entries)
        return None

    def pop(self) -> T | None:
        """Take the first item out; None when there is none."""
        item = self.peek()
        if item is not None:
            heappop(self._entries)
        return item
