"""Large requests are read in a thread, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Reading a smaller body takes less than 10 ms, whatever is in it: 8,192 messages have 250 kB.
LARGE_BYTES: Final = 32 * 1024

#: Whether the request that the current task serves is large.
_is_large: ContextVar[bool] = ContextVar("is_large", default=False)


def note_size(num_bytes: int) -> None:
    """The body of the current task's request has so many bytes."""
    _is_large.set(num_bytes > LARGE_BYTES)


async def read_large(read: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function that reads a part of the request; in a thread if the request is large.

    It must not depend on the event loop, nor set context variables.
    """
    if _is_large.get():
        return await asyncio.to_thread(read, *args, **options)
    return read(*args, **options)


def caller_of_loop() -> Callable[..., None]:
    """A function that calls others on the running loop: at once if it is called there."""
    loop = asyncio.get_running_loop()

    def call(function: Callable[P, object], *args: P.args, **options: P.kwargs) -> None:
        if asyncio._get_running_loop() is loop:
            function(*args, **options)
        else:
            loop.call_soon_threadsafe(partial(function, *args, **options))

    return call
