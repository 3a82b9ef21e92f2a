"""Placement: gives sequences the pages that they begin with, or says when to try again."""

from __future__ import annotations

from typing import NamedTuple

from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.cache.node import Match
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.trials import Trials
from asyncllm.engine.scheduling.waiting.growth import Growth


class _Blocked(NamedTuple):
    """When a sequence that got no pages is tried again.

    Attributes:
        available, check_again: when more pages are available, or those inside have grown so much.
        copies: if not negative, when more copies are done than these.
    """

    available: int = -1
    check_again: int = -1
    copies: int = -1


class Placement:
    """Owns who was refused, and until when."""

    def __init__(self, cache: KVCacheManager, copies: PageCopies, growth: Growth, trials: Trials):
        self._cache = cache
        self._copies = copies
        self._growth = growth
        self._trials = trials
        self._blocked: dict[int, _Blocked] = {}

    def loads(self, match: Match) -> bool:
        """Whether the host part of a match is to be loaded."""
        wanted = match.host or match.state
        return bool(wanted) and not self._trials.active and self._copies.pays(match)

    def place(self, seq: Sequence, match: Match, *, load: bool) -> bool:
        """Give a newcomer its pages, if the pages it is expected to need are available.

        With ``load``, only those of the prefix, and start to load its host part.
        """
        self._cache.hold(seq.kv, match)
        found = len(seq.kv.pages)
        fits = self._growth.fits(seq)
        if fits and self._save_before(seq, match, load=load):
            self._cache.postpone(seq.kv, match)
            return False
        if fits and self._take(seq, match, load=load):
            self._growth.enter(seq, found)
            return True
        self._cache.release(seq.kv, 0)
        self._blocked[seq.id] = _Blocked(self._growth.available, self._growth.check_again)
        return False

    def place_loaded(self, seq: Sequence, match: Match, *, load: bool) -> bool | None:
        """Give a sequence that has a part of its prefix its other pages, or load the next part.

        It begins where the match ends, which may be before the part that was loaded.

        Returns:
            None if it has to wait for copies, False if there are not enough pages.
        """
        if load or match.node is not seq.kv.node:
            self._cache.hold(seq.kv, match)
        if self._save_before(seq, match, load=load):
            return None
        placed = self._take(seq, match, load=load)
        self._growth.expect(seq)
        return placed

    def is_blocked(self, seq: Sequence) -> bool:
        """Whether ``seq`` was refused before, and that can hardly have changed."""
        blocked, growth = self._blocked.get(seq.id), self._growth
        if blocked is None:
            return False
        if blocked.copies >= 0:
            return blocked.copies == self._copies.num_done
        return growth.num_grown < blocked.check_again and growth.available <= blocked.available

    def still_blocked(self, seq: Sequence) -> bool:
        """``is_blocked``; if not, that it was refused is forgotten."""
        if self.is_blocked(seq):
            return True
        self.forget(seq)
        return False

    def forget(self, seq: Sequence) -> None:
        """``seq`` may be tried, or has ended."""
        self._blocked.pop(seq.id, None)

    def _save_before(self, seq: Sequence, match: Match, *, load: bool) -> bool:
        """Whether ``seq`` waits until what its next pages replace is saved."""
        missing = self._cache.pages_for(len(seq.tokens)) - len(seq.kv.pages)
        if load:
            missing = len(self._copies.next_part(match).host)
        if self._trials.active or not self._copies.save_before(missing):
            return False
        self._blocked[seq.id] = _Blocked(copies=self._copies.num_done)
        return True

    def _take(self, seq: Sequence, match: Match, *, load: bool) -> bool:
        """The pages for the rest of its tokens; with ``load``, only to load the next part."""
        if load:
            return self._copies.load(seq, self._copies.next_part(match))
        return self._cache.extend(seq.kv, len(seq.tokens))
