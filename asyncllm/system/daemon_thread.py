"""Long work beside the event loop, in threads that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon(function: Callable[..., T], *args: object) -> T:
    """Run ``function`` in a daemon thread of its own; returns or raises what it does.

    The interpreter joins the threads of ``asyncio.to_thread`` when it exits, so a download that
    hangs would keep the process alive. Cancelling leaves the thread running.
    """
    return await asyncio.wrap_future(start_in_daemon(function, *args))


def start_in_daemon(function: Callable[..., T], *args: object) -> Future[T]:
    """Start ``function`` in a daemon thread of its own; its result comes with the future."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that cancelling does not reach it

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    name = f"asyncllm-{getattr(function, '__name__', 'work').strip('_')}"
    threading.Thread(target=work, name=name, daemon=True).start()
    return future
