"""Slices: long work on the event loop, a few milliseconds at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

#: What takes longer goes on in a later turn of the loop.
SLICE_SECONDS: Final = 0.005


class Slices:
    """Lets one of all that have much to do on the loop go on in a turn, in order of arrival."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._turn = asyncio.Lock()

    async def each(self, items: Iterable[T], function: Callable[[T], object]) -> None:
        """Call ``function`` with each item; the loop does other work in between."""
        until = self._clock() + SLICE_SECONDS
        for item in items:
            if self._clock() >= until:
                async with self._turn:
                    await asyncio.sleep(0)
                until = self._clock() + SLICE_SECONDS
            function(item)


def each_later(items: Iterable[T], function: Callable[[T], object]) -> None:
    """Call ``function`` with each item, with those that take too long in later turns of the loop.

    Whoever calls this may end meanwhile.
    """
    iterator, until = iter(items), time.perf_counter() + SLICE_SECONDS
    for item in iterator:
        function(item)
        if time.perf_counter() >= until:
            asyncio.get_running_loop().call_soon(each_later, iterator, function)
            return
