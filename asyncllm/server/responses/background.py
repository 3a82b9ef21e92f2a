"""Responses that are generated in the background."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from aiohttp import web

from asyncllm.server.http.answer import encode
from asyncllm.server.limits.api_keys import tenant_of
from asyncllm.server.observe.access_log import current_entry
from asyncllm.server.responses.reply import ResponseReply
from asyncllm.server.responses.store import EventLog
from asyncllm.server.service import SERVICE
from asyncllm.server.streaming.delivery import LARGE_ANSWER, Delivery, Job, size_of
from asyncllm.types import TokenDelta

log = logging.getLogger(__name__)


class BackgroundRun(Delivery):
    """One response in progress, with what a ``StoredResponse`` has, too.

    Attributes:
        reply: makes the response.
        log: its events, if the request streams.
    """

    background = True

    def __init__(self, reply: ResponseReply, events: EventLog | None):
        super().__init__(1)
        self.reply = reply
        self.log = events
        self._size = 0
        self._ending: asyncio.Task[None] | None = None
        self._record(reply.opening())

    def _take(self, index: int, delta: TokenDelta) -> None:
        if self.ended:
            return  # failed; the engine does not know yet
        self._size += size_of(delta)
        last = not self._unfinished
        if last and self._size > LARGE_ANSWER:  # the end repeats all
            self._ending = asyncio.create_task(self._end_in_thread(index, delta))
            return
        try:
            self._record(self._events_of(index, delta, last))
        except Exception as error:
            self._fail(error)
            return
        if last:
            self.end()

    def _events_of(self, index: int, delta: TokenDelta, last: bool) -> bytes:
        return self.reply.frames(index, delta) + (self.reply.closing() if last else b"")

    async def _end_in_thread(self, index: int, delta: TokenDelta) -> None:
        try:
            events = await asyncio.to_thread(self._events_of, index, delta, True)
        except Exception as error:
            self._fail(error)
            return
        if not self.ended:
            self._record(events)
            self.end()

    def _fail(self, error: Exception) -> None:
        """The engine calls: an error in one answer must not reach the others."""
        log.exception("request failed while its answer was made", exc_info=error)
        self.end(error)

    def check_client(self, now: float) -> None:
        """No client is connected."""

    def end(self, error: Exception | None = None) -> None:
        if error is not None and not self.ended:
            self._record(self.reply.failure(error))
        super().end(error)

    @property
    def body(self) -> bytes:
        """The response as it stands, as JSON."""
        return encode(self.reply.response)

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

    async def start(
        self, request: web.Request, reply: ResponseReply, job: Job, events: EventLog | None
    ) -> BackgroundRun:
        """Submit the job, and return.

        Raises:
            AsyncLLMError: the engine refused it.
        """
        service = request.app[SERVICE]
        service.check_ready()
        tenant = tenant_of(request)
        run = BackgroundRun(reply, events)
        async with AsyncExitStack() as stack:
            served = await stack.enter_async_context(service.serve(request, run, [job]))
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


async def _attend(run: BackgroundRun, stack: AsyncExitStack) -> None:
    try:
        async with stack:
            try:
                await run.wait()
            finally:
                if run.log is not None:
                    run.log.close()
    finally:
        if (entry := current_entry()) is not None:
            entry.end(200)
