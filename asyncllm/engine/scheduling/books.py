"""Books: whether, while nothing runs, every KV page and every slot is accounted for."""

from __future__ import annotations

from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.scheduling.batch import RunningBatch


class Books:
    """Only to be asked while no sequence is running or waiting, and no step or copy is under way.

    Then all slots are free, and each page is free or cached. Checking compares a few counts, in
    about 2 us whatever the size of the cache, so it may be done whenever the engine becomes idle.
    """

    def __init__(self, cache: KVCacheManager, batch: RunningBatch):
        self._cache = cache
        self._batch = batch

    def mismatch(self) -> str | None:
        """What does not add up; None if all is well."""
        cache, batch = self._cache, self._batch
        if not cache.num_held and not batch.num_taken and cache.pins.num_pages <= cache.num_cached:
            return None
        return (
            f"of {cache.num_pages} pages, {cache.num_free} are free, {cache.num_cached} cached and "
            f"{cache.num_held} held by nobody; {cache.pins.num_pages} are pinned; "
            f"{batch.num_taken} slots are taken by nobody"
        )

    def heal(self) -> None:
        """Free all pages and slots. What was cached is forgotten: a page may be in two places."""
        self._cache.reset()
        self._batch.reset()
