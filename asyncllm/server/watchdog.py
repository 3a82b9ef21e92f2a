"""Watchdog: notices a step or an event loop that makes no progress, from a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from aiohttp import web

from asyncllm.server.crash_report import CrashReports, describe, place_of, stacks_of_all_threads
from asyncllm.server.service import SERVICE
from asyncllm.wire.heartbeat import LENGTHY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncllm.server.service import Service

log = logging.getLogger(__name__)

#: The default of ``stall_seconds``; on a CPU, one step of a large model may take minutes.
STALL_SECONDS: Final = 30.0
CPU_STALL_SECONDS: Final = 300.0
#: A compilation or a capture that takes longer hangs.
LENGTHY_SECONDS: Final = 900.0
#: How often the thread looks, at most.
TICK_SECONDS: Final = 1.0
#: When the thread sleeps so much longer than asked, the process was stopped or starved, and the
#: count starts again.
GAP_SECONDS: Final = 2.0
#: Requests named in the log.
MAX_NAMES: Final = 16


class Ending(Protocol):
    """As ``asyncllm.server.shutdown.Shutdown``: it ends the process, whatever hangs."""

    def engine_died(self) -> None: ...
    def force(self) -> None: ...


class Stall(NamedTuple):
    """What stalls: a message for clients, and what the log says besides."""

    message: str
    detail: str


class Stillness:
    """For how long something has not changed, while this process ran."""

    def __init__(self) -> None:
        self._mark: object = None
        self._seconds = 0.0

    def look(self, mark: object, elapsed: float) -> float:
        """``elapsed`` seconds have passed since the last look."""
        self._seconds = self._seconds + elapsed if mark == self._mark else 0.0
        self._mark = mark
        return self._seconds

    def start_again(self) -> None:
        self._seconds = 0.0


class Watchdog:
    """One thread per application, from its start to its end.

    A step stalls if neither it ends nor any rank begins another operation; a compilation or a
    capture has more time. Then its engine is given up: all its requests get EngineDead. If the
    event loop itself does not run, nobody can be told. Either way there is one line in the log, the
    stacks of all threads, and a report; and where ``ending`` is set, the process ends.

    Attributes:
        ending: ends the process; None in a host application, whose process is not ours.
        stall: what was noticed; None while all is well. It stays, as the engine does not recover.
    """

    def __init__(self, service: Service):
        self.ending: Ending | None = None
        self.stall: str | None = None
        self.reports = CrashReports(service.config.crash_dir)
        self._service = service
        self._step, self._loop_stillness = Stillness(), Stillness()
        self._asked = self._answered = 0  # times that the loop was, and has
        self._loop_reported = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._stop = threading.Event()

    def start(self) -> None:
        """Watch the running loop, and the engine once it is loaded."""
        if self._service.config.stall_seconds == 0:
            return
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._stop.clear()
        threading.Thread(target=self._watch, name="asyncllm-watchdog", daemon=True).start()

    def stop(self) -> None:
        """The thread ends soon; it is not waited for."""
        self._stop.set()

    @property
    def step_seconds(self) -> float:
        """How long a step may make no progress; 0 for ever."""
        given, llm = self._service.config.stall_seconds, self._service.llm
        if given is not None:
            return given
        loaded = llm.vitals is not None
        return CPU_STALL_SECONDS if loaded and llm.limits.device == "cpu" else STALL_SECONDS

    def _watch(self) -> None:
        given = self._service.config.stall_seconds
        loop_seconds = STALL_SECONDS if given is None else given
        tick = min(TICK_SECONDS, loop_seconds / 4)
        looked = time.monotonic()
        while not self._stop.wait(tick):
            now = time.monotonic()
            elapsed, looked = now - looked, now
            if elapsed > tick + GAP_SECONDS:
                self._step.start_again()
                self._loop_stillness.start_again()
                continue
            try:
                self._look(elapsed, loop_seconds)
            except Exception:
                log.exception("the watchdog failed, and goes on")

    def _look(self, elapsed: float, loop_seconds: float) -> None:
        if not self._loop_answers(elapsed, loop_seconds):
            self._step.start_again()  # its result may wait for the loop
        elif self.stall is None and (stall := self._stalled_step(elapsed)) is not None:
            self.stall = stall.message
            self._report(stall, give_up=True)

    # -- the event loop --------------------------------------------------------------------------

    def _loop_answers(self, elapsed: float, limit: float) -> bool:
        """Whether the loop has run since the last look; if it stalls, that is reported."""
        assert self._loop is not None
        still = self._loop_stillness.look(self._answered, elapsed)
        if self._answered == self._asked:
            if self._loop_reported:
                log.warning("the event loop runs again")
                self._loop_reported = False
            self._loop_stillness.start_again()
            self._asked += 1
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # it is closed
                self._stop.set()
            return True
        if still >= limit and not self._loop_reported:
            self._loop_reported = True
            message = f"the event loop has not run for {still:.0f} s"
            stall = Stall(message, f"it is at {place_of(self._loop_thread)}")
            self._report(stall, give_up=False)
            if self.ending is not None:
                self.ending.force()
        return False

    def _answer(self) -> None:
        self._answered += 1

    # -- steps -----------------------------------------------------------------------------------

    def _stalled_step(self, elapsed: float) -> Stall | None:
        llm = self._service.llm
        vitals = llm.vitals
        if vitals is None or not llm.healthy or not vitals.heartbeat.in_flight:
            self._step.start_again()
            return None
        oldest, operation = vitals.heartbeat.in_flight[0], vitals.heartbeat.operation
        peers = [(f"rank {peer.rank}", peer.operation()) for peer in vitals.heartbeat.peers]
        operations = [("the executor", operation), *peers]
        still = self._step.look((oldest, operations), elapsed)
        lengthy = any(operation.name in LENGTHY for _, operation in operations)
        if still < (LENGTHY_SECONDS if lengthy else self.step_seconds):
            return None
        message = f"step {oldest.step} has made no progress for {still:.0f} s"
        now = time.monotonic()
        told = (
            f"{who} is in {operation.name!r} since {now - operation.since:.1f} s"
            for who, operation in operations
        )
        return Stall(
            message,
            f"submitted {now - oldest.since:.1f} s ago; {', '.join(told)};"
            f" requests {self._names()}",
        )

    def _names(self) -> str:
        """Of the requests of the oldest step."""
        vitals = self._service.llm.vitals
        step = None if vitals is None else vitals.oldest_step()
        if step is None:
            return "not known"
        names = self._service.log.names()
        told = [f"{id} ({names[id]})" if id in names else str(id) for id in step[1][:MAX_NAMES]]
        more = len(step[1]) - len(told)
        return ", ".join(told) + (f" and {more} more" if more else "")

    def engine_died(self, cause: str) -> None:
        """The engine has ended by itself: write a report."""
        if self.stall is None:
            report = describe(self._service, cause, stacks_of_all_threads())
            if (path := self.reports.write(report)) is not None:
                log.error("crash report: %s", path)

    # -- both ------------------------------------------------------------------------------------

    def _report(self, stall: Stall, *, give_up: bool) -> None:
        """Say what is known, and have the process end.

        Args:
            give_up: end the requests.
        """
        assert self._loop is not None
        if self.ending is not None:
            self.ending.engine_died()
        stacks = stacks_of_all_threads()
        report = describe(self._service, f"{stall.message}: {stall.detail}", stacks)
        path = self.reports.write(report)
        where = "" if path is None else f"; report: {path}"
        log.critical("stalled: %s: %s%s", stall.message, stall.detail, where)
        log.critical("stacks of all threads:\n%s", stacks)
        if give_up:  # last, because the process may end soon after
            self._loop.call_soon_threadsafe(self._service.llm.give_up, stall.message)


WATCHDOG: Final = web.AppKey("asyncllm_watchdog", Watchdog)


def add_watchdog(app: web.Application) -> None:
    """Watch the application's engine and loop while it runs.

    Raises:
        BadRequest: ``crash_dir`` cannot be written to.
    """
    watchdog = app[WATCHDOG] = Watchdog(app[SERVICE])

    async def watch(_app: web.Application) -> AsyncIterator[None]:
        watchdog.start()
        yield
        watchdog.stop()

    app.cleanup_ctx.append(watch)
