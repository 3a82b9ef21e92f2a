"""The event loop that everything here runs on, and long work on it a few milliseconds at a time."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: What takes longer goes on in a later turn of the loop.
SLICE_SECONDS: Final = 0.005


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run_with_device(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` for a program whose main thread is the loop of an engine."""
    # The thread that drives the device must get the GIL back at once; the default is 5 ms.
    sys.setswitchinterval(1e-4)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def sliced(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, to do something with each; the loop does other work in between."""
    until = time.perf_counter() + SLICE_SECONDS
    for item in items:
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_SECONDS
        yield item


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
