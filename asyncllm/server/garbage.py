"""What the server process does with memory that is free.

Full collections of garbage run when few requests wait for them.

A full collection stops everything for as long as it takes to visit all objects: 10,000 requests
that wait are 300,000 objects, or 0.2 s. Requests of the engine leave no reference cycles, and the
collections of young objects, which visit a few thousand, find nearly all others; only what has
lived for some seconds, such as a closed connection, is left to full collections.

What large answers took is given back to the system, which glibc does not do by itself where
anything is still in use above it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Final

#: Seconds between looks at how busy the server is.
INTERVAL: Final = 1.0
#: With no more requests than this a full collection takes a millisecond or two.
FEW_REQUESTS: Final = 16
#: A full collection is due after so many of the middle generation. There is one of those for about
#: 200 short requests, each on a connection of its own, which leave 0.3 MB of cycles at most.
WORTHWHILE: Final = 10
#: After so many, Python collects fully however busy the server is.
MOST: Final = 500


#: So many bytes are worth giving back. It takes 20 ms for 200 MB, in which no thread gets memory.
WORTH_GIVING_BACK: Final = 16 * 1024 * 1024


async def collect_when_quiet(
    num_requests: Callable[[], int],
    num_freed: Callable[[], int] = lambda: 0,
    interval: float = INTERVAL,
) -> None:
    """Own the process's full collections until cancelled; all that is loaded by now is skipped.

    Args:
        num_requests: how many are being served.
        num_freed: bytes of answers that were freed since the last call.
    """
    thresholds = gc.get_threshold()
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], MOST)
    freed = 0
    try:
        while True:
            await asyncio.sleep(interval)
            freed += num_freed()
            if num_requests() > FEW_REQUESTS:
                continue
            if gc.get_count()[2] >= WORTHWHILE:
                gc.collect()
            if freed >= WORTH_GIVING_BACK:
                freed = 0
                await asyncio.to_thread(give_memory_back)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def give_memory_back() -> None:
    """Give the free pages of the heap to the system, with a C library that can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
