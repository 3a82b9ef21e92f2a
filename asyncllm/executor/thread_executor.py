"""The loop's handle on the thread that owns the device."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol, TypeVar

from asyncllm.config import EngineLimits
from asyncllm.errors import EngineDead
from asyncllm.wire.channel import FLUSH, ThreadChannel
from asyncllm.wire.executor import ResultHandler
from asyncllm.wire.heartbeat import Heartbeat

T = TypeVar("T")

log = logging.getLogger(__name__)

#: How long a process that exits without closing its engine waits for the step that is running.
EXIT_SECONDS: Final = 5.0
#: How long closing waits for the steps in flight. The longest step of a large model on a CPU takes
#: some ten seconds; one that takes longer than this hangs.
CLOSE_SECONDS: Final = 30.0
#: How long the loop gives a thread that drives a GPU to launch a step. While both run, they take
#: the GIL from each other at each call into PyTorch, and a launch of 0.7 ms takes 3 ms.
LAUNCH_PATIENCE: Final = 2e-3


class StepWorker(Protocol):
    """What runs in the thread: ``executor.worker.Worker``, named here without its torch."""

    @property
    def limits(self) -> EngineLimits:
        """The engine's."""

    def run(self, channel: ThreadChannel) -> None:
        """Answer every plan from the channel with one result, until the channel closes."""


class ThreadExecutor:
    """Builds and runs a ``StepWorker`` in one dedicated thread.

    All CUDA calls, and ``inference_mode``, which is thread-local, live in that thread. ``build`` is
    called there, so loading never blocks the loop.

    Args:
        launch_seconds: the longest that ``submit`` waits for a launch. On a CPU, launching a step
            is running it: 0.
    """

    def __init__(self, build: Callable[[], StepWorker], launch_seconds: float = 0.0):
        self.heartbeat = Heartbeat()
        self._build = build
        self._launch_seconds = launch_seconds
        #: Of the steps in flight, in order.
        self._handlers: deque[ResultHandler] = deque()
        self._dead: EngineDead | None = None
        self._tell: Callable[[str], None] = lambda cause: None
        self._channel: ThreadChannel | None = None
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._abandoned = False

    async def start(self) -> EngineLimits:
        loop = asyncio.get_running_loop()
        self._channel = channel = ThreadChannel(loop, self._on_result, self.heartbeat)
        started: asyncio.Future[EngineLimits] = loop.create_future()
        self._ended = loop.create_future()
        # A daemon, so that a program that forgets to close an engine can still exit; but not from
        # under a running kernel, which would abort the process.
        self._thread = threading.Thread(
            target=_thread_main,
            args=(self._build, channel, loop, started, self._on_death, self._ended),
            name="asyncllm-executor",
            daemon=True,
        )
        self._thread.start()
        self._at_exit = weakref.finalize(self, _end_thread, channel, self._thread)
        try:
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            await asyncio.gather(started, return_exceptions=True)  # its caller ends ``build``
            raise

    def on_death(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def submit(self, plan: bytes, on_result: ResultHandler) -> None:
        if self._dead is not None:
            asyncio.get_running_loop().call_soon(on_result, self._dead)
            return
        assert self._channel is not None, "plans come once it has started"
        self._handlers.append(on_result)
        if self._launch_seconds:
            self._channel.send_and_wait(plan, self._launch_seconds)
        else:
            self._channel.send(plan)

    def flush(self) -> None:
        if self._channel is not None:
            self._channel.send(FLUSH)

    def abandon(self) -> None:
        for peer in self.heartbeat.peers:
            peer.print_stacks()
        self._abandoned = True

    async def close(self) -> None:
        """Finish what is in flight and end the thread; one that hangs is left behind."""
        thread = self._thread
        if thread is None or self._channel is None or self._ended is None:
            return
        self._channel.close()
        if not self._abandoned:
            await asyncio.wait([self._ended], timeout=CLOSE_SECONDS)
        if self._ended.done():
            thread.join()
        else:
            log.error("a step has not ended: its thread is left behind")
        self._at_exit.detach()
        self._thread = None
        self._fail_steps(EngineDead("engine closed"))

    def _on_result(self, message: bytes) -> None:
        """Of the oldest step in flight."""
        if self._handlers:  # else it has been closed meanwhile
            self._handlers.popleft()(message)

    def _on_death(self, cause: BaseException) -> None:
        log.error("the executor died", exc_info=cause)
        if not isinstance(cause, EngineDead):
            cause = EngineDead("the executor died; its log has the cause")
        if self._dead is None:
            self._fail_steps(cause)
            self._tell(cause.message)

    def _fail_steps(self, cause: EngineDead) -> None:
        """No step gets a result any more."""
        self._dead = self._dead or cause
        while self._handlers:
            self._handlers.popleft()(self._dead)


def _thread_main(
    build: Callable[[], StepWorker],
    channel: ThreadChannel,
    loop: asyncio.AbstractEventLoop,
    started: asyncio.Future[EngineLimits],
    on_death: Callable[[BaseException], None],
    ended: asyncio.Future[None],
) -> None:
    """The executor thread. Every way out of it is reported to the loop."""
    try:
        try:
            worker = build()
        except BaseException as error:
            # Its frames hold the weights, and a caller may keep the error for long.
            traceback.clear_frames(error.__traceback__)
            _call(loop, _settle, started, None, error)
            return
        _call(loop, _settle, started, worker.limits)
        worker.run(channel)
    except BaseException as error:
        _call(loop, on_death, error)
    finally:
        _call(loop, _settle, ended, None)


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None = None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _end_thread(channel: ThreadChannel, thread: threading.Thread) -> None:
    channel.close()
    thread.join(EXIT_SECONDS)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    with suppress(RuntimeError):  # the program closed the loop, and not its engine
        loop.call_soon_threadsafe(function, *args)
