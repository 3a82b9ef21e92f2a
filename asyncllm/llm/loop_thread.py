"""An event loop for synchronous code: in a background thread, with one resource open on it."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, TypeVar

from asyncllm.errors import EngineDead
from asyncllm.llm.brief_errors import BRIEF, shorten
from asyncllm.system.event_loop import new_event_loop

T = TypeVar("T")

#: Seconds between two ticks for a waiting caller.
TICK_SECONDS: Final = 0.1
#: How long a program that exits without closing waits for the resource to close.
EXIT_SECONDS: Final = 5.0


class LoopThread:
    """An event loop in a thread of its own, with an async context manager open on it.

    Neither the thread nor its loop refers to this object: when it is dropped, the resource is
    closed and the thread ends. A program that exits waits for the closing, but the thread is a
    daemon, so it exits even if closing hangs or was forgotten.
    """

    def __init__(self, resource: AbstractAsyncContextManager[Any]):
        """Returns once ``resource`` is open. Raises what opening it raises."""
        self._loop = new_event_loop()
        stop, stopping = asyncio.Event(), threading.Event()
        opened: Future[None] = Future()
        main: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(
            target=_thread_main,
            args=(self._loop, resource, opened, stop, stopping, main),
            name="asyncllm-loop",
            daemon=True,
        )
        # It must not wait: an object may be collected on the loop's own thread.
        self._stop = weakref.finalize(self, _begin_to_stop, self._loop, stop, stopping)
        self._stop.atexit = False
        self._thread.start()
        try:
            opened.result()
        except BaseException:
            # An interrupt while it opens: give up, and end the thread before the interpreter exits.
            self._stop()
            with suppress(RuntimeError):  # the loop is closed: opening has failed by itself
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in main])
            self._thread.join()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T], tick: Callable[[], None] | None = None) -> T:
        """Run a coroutine on the loop and wait for it; KeyboardInterrupt cancels it.

        Args:
            tick: called in this thread every ``TICK_SECONDS`` while waiting.
        """
        future = self._submit(coroutine)
        try:
            while tick is not None and not future.done():
                wait([future], TICK_SECONDS)
                tick()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """What an async generator on the loop yields. Closing this closes the generator."""
        try:
            while True:
                yield self.run(anext(items))
        except StopAsyncIteration:
            return
        except BRIEF as error:
            shorten(error)
            raise
        finally:
            # Not waited for, as this may run wherever the garbage collector does.
            with suppress(EngineDead):
                self._submit(items.aclose())

    def close(self) -> None:
        """Close the resource and end the thread. Idempotent."""
        self._stop()
        self._thread.join()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._stop.alive:
            with suppress(RuntimeError):  # the loop is closed: the program is exiting
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise EngineDead("closed already")


def _thread_main(
    loop: asyncio.AbstractEventLoop,
    resource: AbstractAsyncContextManager[Any],
    opened: Future[None],
    stop: asyncio.Event,
    stopping: threading.Event,
    main: list[asyncio.Task[None]],
) -> None:
    async def hold_open() -> None:
        main.extend(task for task in [asyncio.current_task()] if task is not None)
        async with resource:
            opened.set_result(None)
            await stop.wait()

    thread = threading.current_thread()

    def end_at_exit() -> None:
        if stopping.is_set():
            thread.join(EXIT_SECONDS)

    atexit.register(end_at_exit)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(hold_open())
    except BaseException as error:
        if not opened.done():
            opened.set_exception(error)
        elif threading.main_thread().is_alive():
            raise
        # Else the interpreter is exiting, and closing may have needed its thread pools.
    finally:
        atexit.unregister(end_at_exit)


def _begin_to_stop(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, stopping: threading.Event
) -> None:
    stopping.set()
    with suppress(RuntimeError):  # the loop is closed: opening the resource has failed
        loop.call_soon_threadsafe(stop.set)
