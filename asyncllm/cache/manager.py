"""Which sequence holds which KV pages."""

from __future__ import annotations

from typing import Protocol

from asyncllm.cache.pages import PageAllocator


class PageHolder(Protocol):
    """The part of a sequence the cache works on: its block table, in order of position."""

    pages: list[int]


class KVCacheManager:
    """Grows and releases block tables; the only caller of the page allocator.

    Invariant: ``num_free + num_held + num_cached == num_pages`` between calls.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self._pages = PageAllocator(num_pages)

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def num_free(self) -> int:
        return self._pages.num_free

    @property
    def num_cached(self) -> int:
        """Pages no live sequence uses, kept for reuse of their prefix."""
        return 0

    @property
    def num_held(self) -> int:
        """Pages of live sequences."""
        return self.num_pages - self.num_free - self.num_cached

    def pages_for(self, num_tokens: int) -> int:
        """How many pages ``num_tokens`` positions take."""
        return -(-num_tokens // self.page_size)

    def extend(self, holder: PageHolder, num_tokens: int) -> bool:
        """Make room for positions ``0 .. num_tokens-1``; False (and no change) when full."""
        missing = self.pages_for(num_tokens) - len(holder.pages)
        if missing <= 0:
            return True
        taken = self._pages.take(missing)
        if taken is None:
            return False
        holder.pages += taken
        return True

    def release(self, holder: PageHolder) -> None:
        """Give all of the holder's pages back. No step in flight may still write to them."""
        self._pages.give_back(holder.pages)
        holder.pages = []
