"""An event loop whose clock jumps to the next timer while nothing happens.

    asyncllm.executor.sim.virtual_time.run(main())

Timers fire in order and at their times by ``loop.time()``, but ``asyncio.sleep(3600)`` takes
microseconds. Code must take the time from the loop. With ``AsyncLLM(device="sim")`` an hour of load
runs in seconds, and each time the same way.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: The time at which a virtual clock starts: not 0, which callers may take for "never".
START: Final = 1.0
#: A longer jump is often a timeout. It waits ``SETTLE_SECONDS`` of real time, in which the kernel
#: may still deliver data between sockets of this process.
LONG_JUMP: Final = 1.0
SETTLE_SECONDS: Final = 0.001
#: Real time without events and timers after which the program counts as stuck.
STUCK_SECONDS: Final = 1.0
#: The most tasks that a ``Deadlock`` names.
MOST_NAMED: Final = 10


class Deadlock(RuntimeError):
    """Every task waits, and nothing will wake one."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time passes only when every task waits, and then jumps to the next timer.

    Sockets work between tasks of the same loop. The clock stands still while threads of
    ``to_thread`` and ``run_in_executor`` work, so these must not wait for a timer of this loop.

    Raises:
        Deadlock: from ``run_forever`` and ``run_until_complete``: no timer is set, no thread works
            and no socket has data.
    """

    def __init__(self) -> None:
        self._now = START
        self._jobs = 0
        super().__init__(_JumpingSelector(self._wait))

    def time(self) -> float:
        return self._now

    def spend(self, seconds: float) -> None:
        """See the function."""
        self._now += seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        future.add_done_callback(self._job_done)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._jobs += 1  # it joins the threads in a thread of its own
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._jobs -= 1

    def _job_done(self, _future: asyncio.Future[Any]) -> None:
        self._jobs -= 1

    def _wait(self, system: _JumpingSelector, timeout: float | None) -> _Events:
        """``select`` of this loop: return I/O events, or advance the clock by ``timeout``."""
        events = system.poll(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if self._jobs:
            return system.poll()
        if timeout is None:
            if events := system.poll(STUCK_SECONDS):
                return events
            raise Deadlock(
                "no timer is set and nothing happens on any socket, but there are tasks waiting: "
                + ", ".join(sorted(map(_describe, asyncio.all_tasks(self)))[:MOST_NAMED])
            )
        sockets = len(system.get_map()) > 1  # one is the loop's own
        if timeout > LONG_JUMP and sockets and (events := system.poll(SETTLE_SECONDS)):
            return events
        # Just after the timer, which fires when its time has passed.
        self._now = math.nextafter(self._now + timeout, math.inf)
        return []


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on a virtual clock.

    Raises:
        Deadlock: ``main`` waits for something that never happens.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def spend(seconds: float) -> None:
    """Let time pass within a callback, as if it computed; timers that come due fire late.

    Does nothing on a real clock, where the event loop takes its time by itself.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        loop.spend(seconds)


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Seconds at the pace of the loop's timers, in the best resolution."""
    return loop.time if isinstance(loop, VirtualTimeLoop) else time.perf_counter


def _describe(task: asyncio.Task[Any]) -> str:
    return f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')})"


_Events = list[tuple[selectors.SelectorKey, int]]


class _JumpingSelector(selectors.DefaultSelector):
    """The system's selector with a ``select`` of the loop's own; ``poll`` is the system's."""

    def __init__(self, wait: Callable[[_JumpingSelector, float | None], _Events]):
        super().__init__()
        self._wait = wait

    def poll(self, timeout: float | None = None) -> _Events:
        return super().select(timeout)

    def select(self, timeout: float | None = None) -> _Events:
        return self._wait(self, timeout)
