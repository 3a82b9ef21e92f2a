"""Growth: the pages that admitted sequences will take and give back, and whether one more fits."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import Sequence

#: The share of the pages that admissions leave free, for rows that grow more than expected.
WATERMARK = 0.01
#: All sequences inside can grow by this many pages before one is preempted, if none ends.
NEAR = 16
#: Beyond, this share of their growth is counted: until then some will have been preempted, and
#: resumed when others have ended. With more, the cache is half empty while sequences that began
#: together grow; with less, those preempted wait longer.
FAR_SHARE = 0.6


@dataclass(slots=True)
class Resident:
    """A sequence with pages, as far as its growth goes.

    Attributes:
        found: pages that it found in the cache when it was last admitted.
        expected: pages that it is expected to have at its end.
        more: those of ``expected`` that it does not have yet.
    """

    seq: Sequence
    found: int
    expected: int = 0
    more: int = 0


class Growth:
    """The sequences with pages, running or about to, and what they are expected to take.

    Sequences of the same age end together, when each of them is longest; of different ages, one
    takes the pages that another gives back. So a newcomer fits when, at the end of each sequence
    inside, the pages that all others have taken by then are there (the peak of Gong et al.,
    Past-Future Scheduler for LLM Serving, ASPLOS 2025).
    """

    def __init__(self, cache: KVCacheManager, forecast: Forecast):
        self._cache = cache
        self._forecast = forecast
        self._inside: dict[int, Resident] = {}
        self._promised = 0  # pages that they are still expected to take
        self._watermark = max(1, int(cache.num_pages * WATERMARK))
        self._num_grown = 0

    @property
    def available(self) -> int:
        """Pages that no sequence inside is expected to take; all when a newcomer is alone."""
        spoken_for = self._promised + self._watermark if self._inside else 0
        return self._cache.num_available - spoken_for

    def available_beside(self, count: int) -> int:
        """``available`` once another sequence is inside that takes ``count`` pages."""
        return self._cache.num_available - self._promised - self._watermark - count

    @property
    def most(self) -> int:
        """``available`` at best, while another sequence is inside."""
        return self._cache.num_pages - self._watermark

    @property
    def check_again(self) -> int:
        """When ``num_grown`` is this, the sequences inside have grown by a page each."""
        return self._num_grown + len(self._inside) + 1

    @property
    def num_grown(self) -> int:
        """Pages that sequences have grown by so far."""
        return self._num_grown

    def fits(self, seq: Sequence) -> bool:
        """Whether there is room for ``seq``, which holds the pages that it found in the cache."""
        if not self._inside:
            return True
        expected = self._cache.pages_for(self._forecast.length(seq))
        if expected - len(seq.kv.pages) <= self.available:
            return True
        if seq.output.surely_full:
            return False  # its kind does not count on others to end before
        begins_with = self._cache.pages_for(len(seq.tokens))
        taken = begins_with - len(seq.kv.pages)
        inside = self._inside.values()
        rows = [(other.more, len(other.seq.kv.pages) - other.found) for other in inside]
        rows.append((max(0, expected - begins_with), taken))
        rows.sort()
        room, num_left = self._cache.num_available - self._watermark - taken, len(rows)
        for more, own in rows:
            near = min(more, NEAR)
            if num_left * (near + FAR_SHARE * (more - near)) > room:
                return False
            num_left -= 1
            room += own
        return True

    def enter(self, seq: Sequence, found: int) -> None:
        """``seq`` has pages from now on, ``found`` of them from the cache."""
        self._inside[seq.id] = Resident(seq, found)
        self.expect(seq)

    def expect(self, seq: Sequence) -> None:
        """The pages of ``seq`` have changed otherwise than by growth: expect its end anew."""
        resident = self._inside[seq.id]
        resident.expected = self._cache.pages_for(self._forecast.length(seq))
        self._promise(resident)

    def grew(self, seq: Sequence) -> int:
        """``seq`` has taken one page more; returns how many more than before it is to take."""
        self._num_grown += 1
        resident, num_pages = self._inside[seq.id], len(seq.kv.pages)
        before = resident.expected
        if self._forecast.grew(seq) or num_pages > before:
            resident.expected = max(self._cache.pages_for(self._forecast.length(seq)), num_pages)
        self._promise(resident)
        return resident.expected - before

    def resident(self, seq: Sequence) -> Resident:
        """Of a sequence with pages."""
        return self._inside[seq.id]

    def leave(self, seq: Sequence) -> None:
        """``seq`` gives its pages up."""
        self._promised -= self._inside.pop(seq.id).more

    def _promise(self, resident: Resident) -> None:
        more = max(0, resident.expected - len(resident.seq.kv.pages))
        self._promised += more - resident.more
        resident.more = more
