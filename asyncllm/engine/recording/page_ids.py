"""Numbers for pages of tokens: equal pages after equal pages get the same number.

The prefix cache only compares pages, so it decides the same with these numbers instead of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

#: Unused segments that may be forgotten for each new segment and each ended sequence.
ATTEMPTS: Final = 2


class Segment:
    """A run of pages that appeared together, after page ``at`` of its parent.

    Attributes:
        first: the number of its first page; the other pages have the next numbers. A root has no
            pages, and the number ``first - 1``.
        data: the pages' tokens.
        children: by the pages of this segment before them, and the tokens of their first page.
        users: live sequences that end in it.
    """

    __slots__ = ("at", "children", "data", "first", "parent", "salt", "users")

    def __init__(self, parent: Segment | None, at: int, salt: bytes, first: int, data: bytes):
        self.parent = parent
        self.at = at
        self.salt = salt
        self.first = first
        self.data = data
        self.children: dict[tuple[int, bytes], Segment] = {}
        self.users = 0


class Place(NamedTuple):
    """The end of the first ``depth`` pages of a segment."""

    segment: Segment
    depth: int

    @property
    def node(self) -> int:
        """The number of the last page, or of the root."""
        return self.segment.first + self.depth - 1


class PageIds:
    """Numbers pages, and forgets pages that are in no live sequence and not in the prefix cache.

    Should such a page come again, it is new to the cache as well.

    Args:
        limit: about how many nodes are remembered beyond those of live sequences.
        cached: ``cached(tokens, salt)``, whether the cache has that path of full pages.
    """

    def __init__(self, page_size: int, limit: int, cached: Callable[[array[int], bytes], bool]):
        self.num_nodes = 0
        self._page = page_size * array("i").itemsize
        self._limit = limit
        self._cached = cached
        self._roots: dict[bytes, Segment] = {}
        self._next = 0
        self._live_pages = 0
        #: Segments without users and children, the least recently used first.
        self._unused: dict[Segment, None] = {}

    def enter(self, salt: bytes) -> tuple[Place, bool]:
        """The root for ``salt``, in use until ``leave``; and whether it is new."""
        root = self._roots.get(salt)
        new = root is None
        if root is None:
            root = self._roots[salt] = Segment(None, 0, salt, self._next + 1, b"")
            self._next += 1
            self.num_nodes += 1
        self._use(root)
        return Place(root, 0), new

    def extend(self, place: Place, data: bytes) -> tuple[Place, Place, int]:
        """Follow full pages of tokens (int32 bytes) from a place that is in use.

        Returns:
            The new place, in use instead of the old one; the end of the pages that were known; and
            the number of new pages after it, which get the next numbers.
        """
        known, start = self._follow(place, data)
        end, num_new = known, (len(data) - start) // self._page
        if num_new:
            parent, at = known
            rest = data[start:]
            segment = Segment(parent, at, parent.salt, self._next, rest)
            self._next += num_new
            self.num_nodes += num_new
            parent.children[at, rest[: self._page]] = segment
            self._unused.pop(parent, None)
            end = Place(segment, num_new)
        self._use(end.segment)
        self._drop(place.segment)
        self._live_pages += len(data) // self._page
        if num_new:
            self._trim()
        return end, known, num_new

    def leave(self, place: Place, num_pages: int) -> None:
        """A sequence of ``num_pages`` full pages, at ``place``, has ended."""
        self._drop(place.segment)
        self._live_pages -= num_pages
        self._trim()

    def _trim(self) -> None:
        for _ in range(ATTEMPTS):
            if self.num_nodes <= self._limit + self._live_pages or not self._unused:
                break
            self._forget(next(iter(self._unused)))

    def _follow(self, place: Place, data: bytes) -> tuple[Place, int]:
        """The end of the known pages, and the bytes of ``data`` up to there."""
        segment, depth = place
        page, start = self._page, 0
        while start < len(data):
            mine = segment.data[depth * page : depth * page + len(data) - start]
            same = _common(mine, data[start : start + len(mine)], page)
            depth += same // page
            start += same
            child = segment.children.get((depth, data[start : start + page]))
            if child is None:
                break
            segment, depth = child, 0
        return Place(segment, depth), start

    def _use(self, segment: Segment) -> None:
        segment.users += 1
        self._unused.pop(segment, None)

    def _drop(self, segment: Segment) -> None:
        segment.users -= 1
        self._offer(segment)

    def _offer(self, segment: Segment) -> None:
        if not segment.users and not segment.children:
            self._unused[segment] = None

    def _forget(self, segment: Segment) -> None:
        """Forget an unused segment, unless the cache has it."""
        del self._unused[segment]
        parent = segment.parent
        if parent is None:
            del self._roots[segment.salt]
            self.num_nodes -= 1
        elif self._cached(self._path(segment), segment.salt):
            self._unused[segment] = None
        else:
            del parent.children[segment.at, segment.data[: self._page]]
            self.num_nodes -= len(segment.data) // self._page
            self._offer(parent)

    def _path(self, segment: Segment) -> array[int]:
        """The tokens up to the end of its first page."""
        parts = [segment.data[: self._page]]
        at, above = segment.at, segment.parent
        while above is not None:
            parts.append(above.data[: at * self._page])
            at, above = above.at, above.parent
        tokens = array("i")
        tokens.frombytes(b"".join(reversed(parts)))
        return tokens


def _common(a: bytes, b: bytes, page: int) -> int:
    """Length of the common prefix of two byte strings of equal length, in whole pages."""
    if a == b:
        return len(a)
    differ = np.frombuffer(a, dtype="<i4") != np.frombuffer(b, dtype="<i4")
    return int(differ.argmax()) * 4 // page * page
