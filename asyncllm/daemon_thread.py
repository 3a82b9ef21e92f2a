"""Long work beside the event loop, in threads that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon(function: Callable[..., T], *args: object) -> T:
    """What ``function`` returns or raises; it runs in a daemon thread of its own.

    The interpreter joins the threads of ``asyncio.to_thread`` when it exits, so a download that
    hangs would keep the process alive. Cancelling leaves the thread behind.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(resolve, result, error)

    name = f"asyncllm-{getattr(function, '__name__', 'work').strip('_')}"
    threading.Thread(target=work, name=name, daemon=True).start()
    return await future


__all__ = ["run_in_daemon"]
