"""Entry: what is known of one request, for those who are told when it has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from asyncllm.server.http.middleware import FAILURE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp.typedefs import Middleware

    from asyncllm.engine.requests.history import RequestTrace
    from asyncllm.types import SamplingParams

    FindTrace = Callable[[int], RequestTrace | None]
    Observer = Callable[["Entry"], None]

log = logging.getLogger(__name__)

#: nginx's status for a client that left before its answer was complete.
CLIENT_LEFT: Final = 499


class Entry:
    """One request so far.

    Attributes:
        request: as it arrived.
        began_at: when it did, in nanoseconds since 1970.
        model: the name that the request gives the model, once it is known to be one of ours.
        params: of its sequences; None while there are none.
        queued_after: seconds until the engine got them.
        postponed: the request goes on after its answer, and ends later.
        status: of the answer; 0 before its end.
        seconds: how long it took; 0 before its end.
    """

    def __init__(self, find_trace: FindTrace, observers: Sequence[Observer], request: web.Request):
        self.request = request
        self.began_at = time.time_ns()
        self.model = ""
        self.params: SamplingParams | None = None
        self.queued_after = 0.0
        self.postponed = False
        self.status = 0
        self.seconds = 0.0
        self._find_trace = find_trace
        self._observers = observers
        self._begun = time.perf_counter()
        self._engine_ids: Sequence[int] | None = None

    def submitted(self, engine_ids: Sequence[int], params: SamplingParams | None) -> None:
        """The engine is about to get its sequences; their ids are added to ``engine_ids``."""
        self._engine_ids = engine_ids
        self.params = params
        self.queued_after = time.perf_counter() - self._begun

    def end(self, status: int) -> None:
        """Tell the observers."""
        self.status = CLIENT_LEFT if isinstance(self.failure, ConnectionError) else status
        self.seconds = time.perf_counter() - self._begun
        for observe in self._observers:
            try:
                observe(self)
            except Exception:
                log.exception("what a request did could not be told")

    @property
    def failure(self) -> Exception | None:
        return self.request.get(FAILURE)

    @property
    def is_probe(self) -> bool:
        """Whether it is a successful GET, of which nothing is told: a probe or a scrape."""
        return self.request.method in ("GET", "HEAD", "OPTIONS") and self.status < 400

    @property
    def route(self) -> str:
        """The path with its placeholders: clients choose what stands in their place."""
        resource = self.request.match_info.route.resource
        return self.request.rel_url.raw_path if resource is None else resource.canonical

    def traces(self) -> list[RequestTrace] | None:
        """What the engine did; None without sequences, and empty where it no longer knows."""
        if self._engine_ids is None:
            return None
        found = [self._find_trace(id) for id in self._engine_ids]
        traces = [trace for trace in found if trace is not None]
        return traces if len(traces) == len(found) else []


#: The entry of the request that the current task serves; unset when nobody observes.
_entry: ContextVar[Entry] = ContextVar("asyncllm_entry")


def current_entry() -> Entry | None:
    return _entry.get(None)


def observe_requests(find_trace: FindTrace, observers: Sequence[Observer]) -> Middleware:
    """The outermost middleware, so that refusals are seen too.

    Args:
        find_trace: what the engine knows of a sequence, by its id; None when that is forgotten.
        observers: called in this order when a request has ended.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        entry = Entry(find_trace, observers, request)
        _entry.set(entry)
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            entry.end(CLIENT_LEFT)
            raise
        if not entry.postponed:
            entry.end(response.status)
        return response

    return middleware
