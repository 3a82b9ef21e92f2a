"""Ending the server process: signals, and a deadline that no hang can postpone."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from asyncllm.supervise.signals import (
    DEAD,
    FORWARDED_STOP,
    GRACE_SECONDS,
    SAME_SECONDS,
    STOPS,
    Terminal,
)

log = logging.getLogger(__name__)

#: The process ends itself this much before the kernel's timer does, to log what hung.
FORCE_SECONDS: Final = 0.5
#: The exit code of a process that had to be ended.
FORCED: Final = 1


class Shutdown:
    """Runs the server in a thread; the main thread only handles signals and the deadline.

    So nothing else that hangs can delay them: the event loop, the executor thread, a download, a
    thread pool that the interpreter joins. If the main thread cannot run either, because C code
    holds the GIL or the log blocks, a timer of the kernel ends the process half a second later.
    One case remains: C code that holds the GIL when the first signal comes, which Python then
    never sees.

    Attributes:
        stop: set by the first signal: drain, then close.
        hurry: set by the second: cut off running requests.
        reload: set by a SIGHUP, unless the terminal is gone, which counts as SIGTERM.
    """

    def __init__(
        self,
        drain_seconds: float,
        grace_seconds: float = GRACE_SECONDS,
        *,
        is_supervised: bool = False,
    ):
        """
        Args:
            is_supervised: the parent process passes signals on.
        """
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.reload = asyncio.Event()
        self._is_supervised = is_supervised
        self._terminal = Terminal()
        self._drain_seconds = drain_seconds
        self._grace_seconds = grace_seconds
        self._signals = 0
        self._direct = self._forwarded = 0
        self._is_acting = False
        self._signalled_at = -SAME_SECONDS
        self._closing = False
        self._forced_code = FORCED
        self._deadline: float | None = None
        self._waker: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, serve: Callable[[], int]) -> int:
        """Run ``serve`` in another thread, and return or raise what it does. Call it once.

        The process must exit with the result: the kernel's timer stays armed.
        """
        result: list[int] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                result.append(serve())
            except BaseException as error:
                errors.append(error)
            finally:
                self._wake()

        # With two signals at once, Linux may run the C handlers of both in other threads. Only the
        # wake-up socket tells the main thread then, whose system calls are not interrupted.
        woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number in STOPS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hang_up)
        if self._is_supervised:
            signal.signal(FORWARDED_STOP, self._on_signal)
        threading.Thread(target=work, name="asyncllm-loop").start()
        while not result and not errors:
            woken.settimeout(self._left())
            with suppress(OSError):
                woken.recv(4096)
            self._force_if_due()
        signal.set_wakeup_fd(-1)
        self._waker.close()
        woken.close()
        self.closing()
        if result == [DEAD]:  # a thread or a GPU that hangs can hold the interpreter's end up, too
            self._leave()
        # The interpreter would collect all there is, twice, before the system frees it anyway.
        gc.freeze()
        # The interpreter waits for threads without a limit when it exits, in this thread.
        threading.Thread(target=self._watch_exit, name="asyncllm-exit", daemon=True).start()
        if errors:
            raise errors[0]
        return result[0]

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called on the loop that waits for ``stop`` and ``hurry``."""
        self._loop = loop
        if self._signals:
            self.stop.set()

    def closing(self) -> None:
        """Draining is over: the process has at most the grace period to end.

        From now on a signal ends it at once.
        """
        self._closing = True
        self._end_within(self._grace_seconds)

    def engine_died(self) -> None:
        """The process has at most the grace period to end, then with ``DEAD``; from any thread."""
        self._forced_code = DEAD
        self._end_within(self._grace_seconds)

    def force(self) -> NoReturn:
        """End the process at once, and log which threads still ran; from any thread."""
        self._force()

    def _on_hang_up(self, number: int, frame: FrameType | None) -> None:
        if self._terminal.hung_up():
            self._on_signal(number, frame)
        else:
            self._set(self.reload)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == FORWARDED_STOP:
            self._forwarded += 1
        else:
            now = time.monotonic()
            if now - self._signalled_at < SAME_SECONDS:
                return
            self._signalled_at = now
            self._direct += 1
        # A handler may interrupt a handler, which then does the work of both.
        while not self._is_acting and self._signals < self._count():
            self._is_acting = True
            while self._signals < self._count():
                self._signals += 1
                self._act()
            self._is_acting = False

    def _count(self) -> int:
        """What a terminal sends to the process group comes both ways, and counts once."""
        return max(self._direct, self._forwarded)

    def _act(self) -> None:
        if self._signals == 1:
            self._end_within(self._drain_seconds + self._grace_seconds)
            self._set(self.stop)
        elif self._signals == 2 and not self._closing:
            self._end_within(self._grace_seconds)
            self._set(self.hurry)
        else:
            self._force()

    def _set(self, event: asyncio.Event) -> None:
        if self._loop is None:
            event.set()
            return
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(event.set)

    def _end_within(self, seconds: float) -> None:
        """Move the deadline closer, never away."""
        deadline = time.monotonic() + seconds
        if self._deadline is None or deadline < self._deadline:
            self._deadline = deadline
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
            self._wake()

    def _wake(self) -> None:
        """Have the main thread look again."""
        if self._waker is not None:
            with suppress(OSError):  # it is full: the main thread wakes anyway; or closed
                self._waker.send(b"\0")

    def _left(self) -> float | None:
        """Seconds until the process must be ended; None while nothing ends it."""
        if self._deadline is None:
            return None
        return max(self._deadline - FORCE_SECONDS - time.monotonic(), 0.0)

    def _watch_exit(self) -> None:
        while True:
            time.sleep(self._left() or 0.0)
            self._force_if_due()

    def _force_if_due(self) -> None:
        if self._left() == 0.0:
            self._force()

    def _force(self) -> NoReturn:
        """End the process at once, and log which threads still ran."""
        # The kernel ends the process if writing the log hangs.
        signal.setitimer(signal.ITIMER_REAL, FORCE_SECONDS)
        log.error("not waiting any longer for: %s", _still_running())
        self._leave()

    def _leave(self) -> NoReturn:
        logging.shutdown()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self._forced_code)


def _still_running() -> str:
    """Where each thread is, except this one and idle threads of pools."""
    frames = sys._current_frames()
    places = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is threading.current_thread() or frame is None:
            continue
        code = frame.f_code
        file = Path(code.co_filename).name
        if (file, code.co_name) != ("thread.py", "_worker"):
            places.append(f"{thread.name} ({file}:{frame.f_lineno}, {code.co_name})")
    return "; ".join(places) or "the interpreter"
