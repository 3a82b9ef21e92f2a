"""The free list of KV pages: plain ints, no tensors."""

from __future__ import annotations


class PageAllocator:
    """Hands out page numbers ``0 .. num_pages-1``, each to one owner at a time.

    The most recently freed page is handed out first: it is the likeliest to be in a cache.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def take_one(self) -> int | None:
        """One page, or None when none is free."""
        return self._free.pop() if self._free else None

    def give_back(self, pages: list[int]) -> None:
        """Return pages taken before; their owner must not use them any more."""
        self._free.extend(reversed(pages))
