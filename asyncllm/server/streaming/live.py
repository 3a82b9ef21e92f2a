"""The requests being served now: their sequences submitted, their clients watched."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Final

from asyncllm.engine.requests.reservations import Reservation
from asyncllm.server.http.middleware import request_id
from asyncllm.server.model import Model
from asyncllm.server.observe.access_log import current_entry
from asyncllm.server.request_log import Served
from asyncllm.server.streaming.delivery import Delivery, Job
from asyncllm.system.event_loop import Slices, each_later

log = logging.getLogger(__name__)

#: How often, in seconds, all clients are checked; a step checks those that it delivers to.
SWEEP_SECONDS: Final = 0.1
#: Aborted requests are logged together, this long after the first of them at the latest.
ABORT_SECONDS: Final = 1.0
#: If more requests than this were aborted, they are logged in one line.
MOST_LINES: Final = 3


class ChoiceSink:
    """The Sink of one sequence."""

    __slots__ = ("emit", "fail")

    def __init__(self, delivery: Delivery, index: int):
        self.emit = partial(delivery.push, index)
        self.fail = delivery.end


class AbortLog:
    """Logs requests that were aborted: a few one by one, those of a stopped load in one line."""

    def __init__(self) -> None:
        #: The cause of each, and the context that names its request.
        self._found: list[tuple[str, Context]] = []

    def add(self, cause: str) -> None:
        """Note the current request; it is logged within ``ABORT_SECONDS``."""
        if not self._found:
            asyncio.get_running_loop().call_later(ABORT_SECONDS, self.flush, context=Context())
        self._found.append((cause, copy_context()))

    def flush(self) -> None:
        found, self._found = self._found, []
        if len(found) <= MOST_LINES:
            for cause, context in found:
                context.run(log.info, "request %s aborted: %s", context[request_id], cause)
            return
        causes = Counter(cause for cause, _ in found).most_common()
        counted = ", ".join(f"{cause} ({count:,})" for cause, count in causes)
        Context().run(log.info, "%d requests aborted: %s", len(found), counted)


class LiveRequests:
    """The requests being served now.

    It looks for clients that disconnect while no step delivers to them (a queued request, a long
    prefill). aiohttp cancels their handlers only if its runner is set up so, which a host
    application's need not be.
    """

    def __init__(self, on_end: Callable[[Served], None]) -> None:
        """``on_end``: called with each request that has ended."""
        self._on_end = on_end
        self._slices = Slices()
        self._deliveries: dict[Served, Delivery] = {}
        self._aborts = AbortLog()
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._deliveries)

    @asynccontextmanager
    async def serve(
        self,
        llm: Model,
        delivery: Delivery,
        jobs: Sequence[Job],
        reservation: Reservation | None = None,
    ) -> AsyncIterator[Served]:
        """Submit the jobs, many in several turns of the loop; leaving aborts those that still run.

        Args:
            reservation: has a place for each job.

        Raises:
            BadRequest, QueueFull, DeadlineExceeded, EngineDead: one job was refused; the others
                are taken back.
        """
        ids: list[int] = []
        served = Served(ids)
        self._add(served, delivery)
        if (entry := current_entry()) is not None:
            entry.submitted(ids, jobs[0].params if jobs else None)

        def submit(numbered: tuple[int, Job]) -> None:
            index, (prompt_ids, params, scheduling) = numbered
            sink = ChoiceSink(delivery, index)
            ids.append(llm.submit(prompt_ids, params, sink, scheduling, reservation))

        try:
            delivery.begin()
            await self._slices.each(enumerate(jobs), submit)
            yield served
        except (asyncio.CancelledError, ConnectionError) as error:
            self._aborts.add(str(delivery.error or error) or "cancelled")
            raise
        finally:
            each_later(ids, llm.abort)
            self._remove(served)

    def abort(self, served: Served) -> bool:
        """End all sequences of a request; returns False if it has ended already."""
        delivery = self._deliveries.get(served)
        if delivery is not None:
            delivery.abort()
        return delivery is not None

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def end_all(self, error: Exception) -> None:
        for delivery in self._deliveries.values():
            delivery.end(error)

    def _add(self, served: Served, delivery: Delivery) -> None:
        self._deliveries[served] = delivery
        self._empty.clear()
        if self._timer is None:
            self._arm()

    def _remove(self, served: Served) -> None:
        del self._deliveries[served]
        self._on_end(served)
        if not self._deliveries:
            self._aborts.flush()
            self._empty.set()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        for delivery in self._deliveries.values():
            delivery.check_client(now)
        if self._deliveries:
            self._arm()
        else:
            self._timer = None
