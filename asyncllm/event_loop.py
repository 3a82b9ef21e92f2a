"""The event loop that everything here runs on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
