"""Responses that are generated in the background."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from asyncllm.server.limits.api_keys import tenant_of
from asyncllm.server.observe.entry import current_entry
from asyncllm.server.service import SERVICE
from asyncllm.server.streaming.delivery import Delivery

if TYPE_CHECKING:
    from aiohttp import web

    from asyncllm.server.responses.reply import ResponseReply
    from asyncllm.server.responses.store import EventLog
    from asyncllm.server.streaming.delivery import Job
    from asyncllm.types import TokenDelta

log = logging.getLogger(__name__)


class BackgroundRun(Delivery):
    """One response in progress.

    Attributes:
        reply: has the response as it stands.
        log: its events, if the request streams.
    """

    def __init__(self, reply: ResponseReply, events: EventLog | None):
        super().__init__(1)
        self.reply = reply
        self.log = events
        self._record(reply.opening())

    def _take(self, index: int, delta: TokenDelta) -> None:
        if self.ended:
            return  # failed; the engine does not know yet
        try:
            self._record(self.reply.frames(index, delta))
            if not self._unfinished:
                self._record(self.reply.closing())
        except Exception as error:
            # The engine calls: an error in one answer must not reach the others.
            log.exception("request failed while its answer was made")
            self.end(error)
            return
        if not self._unfinished:
            self.end()

    def look(self, now: float) -> None:
        """No client is connected."""

    def end(self, error: Exception | None = None) -> None:
        if error is not None and not self.ended:
            self._record(self.reply.failure(error))
        super().end(error)

    @property
    def ended(self) -> bool:
        """Whether the response is final; it has been stored then."""
        return self._ended.done()

    async def wait(self) -> None:
        """Wait until it has ended or failed."""
        await self._ended

    def _record(self, events: bytes) -> None:
        if self.log is not None:
            self.log.add(events)


class BackgroundRuns:
    """All responses in progress."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], BackgroundRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, request: web.Request, reply: ResponseReply, job: Job, events: EventLog | None
    ) -> BackgroundRun:
        """Submit the job, and return at once.

        Raises:
            AsyncLLMError: the engine refused it.
        """
        service = request.app[SERVICE]
        service.check_ready()
        tenant = tenant_of(request)
        run = BackgroundRun(reply, events)
        with ExitStack() as stack:
            served = stack.enter_context(service.serve(request, run, [job]))
            service.name(served, reply, tenant)
            name = (tenant, reply.id)
            self._runs[name] = run
            stack.callback(self._runs.pop, name)
            if (entry := current_entry()) is not None:
                entry.postponed = True
            task = asyncio.create_task(_attend(run, stack.pop_all()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run

    def find(self, tenant: str, id: str) -> BackgroundRun | None:
        """The run of a response that has not ended."""
        run = self._runs.get((tenant, id))
        return None if run is None or run.ended else run

    async def aclose(self) -> None:
        """Cancel all runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _attend(run: BackgroundRun, stack: ExitStack) -> None:
    try:
        with stack:
            try:
                await run.wait()
            finally:
                if run.log is not None:
                    run.log.close()
    finally:
        if (entry := current_entry()) is not None:
            entry.end(200)
