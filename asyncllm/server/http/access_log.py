"""One line in the log for each request: tenant, model, tokens, times, errors. Never its text.

Successful GETs have no line: they are probes and scrapes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from asyncllm.errors import AsyncLLMError
from asyncllm.server.http.api_keys import tenant_of
from asyncllm.server.http.middleware import FAILURE, request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp.typedefs import Middleware

    from asyncllm.engine.requests.history import RequestTrace

    FindTrace = Callable[[int], RequestTrace | None]

log = logging.getLogger(__name__)

#: nginx's status for a client that left before its answer was complete.
CLIENT_LEFT: Final = 499

#: Clients choose some of the words; none may break the line or fill the log.
_UNPRINTABLE: Final = re.compile(r"[^\x21-\x7e]")
_MAX_WORD: Final = 100


class Entry:
    """What is known of one request so far.

    Attributes:
        model: the name that the request gives the model, once it is known to be one of ours.
        postponed: the request goes on after its answer, and is logged when it ends.
    """

    def __init__(self, find_trace: FindTrace, request: web.Request):
        self.model = ""
        self.postponed = False
        self._find_trace = find_trace
        self._request = request
        self._begun = time.perf_counter()
        self._engine_ids: Sequence[int] | None = None
        self._queued_after = 0.0

    def submitted(self, engine_ids: Sequence[int]) -> None:
        """The engine is about to get its sequences; their ids are added to ``engine_ids``."""
        self._engine_ids = engine_ids
        self._queued_after = time.perf_counter() - self._begun

    def write(self, status: int) -> None:
        """Log the line."""
        error = self._request.get(FAILURE)
        if isinstance(error, ConnectionError):
            status = CLIENT_LEFT
        if self._request.method in ("GET", "HEAD", "OPTIONS") and status < 400:
            return
        words = [_word(request_id.get()), self._request.method, _route(self._request), str(status)]
        words += [f"model={_word(self.model)}", f"tenant={_word(tenant_of(self._request))}"]
        words += self._work()
        if isinstance(error, AsyncLLMError):
            words += [f"error={error.type}", f"code={_word(error.code)}"]
            words += [f"param={_word(error.param)}"]
        words.append(f"total={_ms(time.perf_counter() - self._begun)}")
        log.info("request %s", " ".join(words))

    def _work(self) -> list[str]:
        """What the engine did; "-" where it no longer knows."""
        if self._engine_ids is None:
            return []
        found = [self._find_trace(id) for id in self._engine_ids]
        traces = [trace for trace in found if trace is not None]
        if not traces or len(traces) < len(found):
            return ["prompt=-", "cached=-", "output=-", "finish=-", "ttft=-"]
        return [
            f"prompt={sum(trace.prompt_tokens for trace in traces)}",
            f"cached={sum(trace.cached_tokens for trace in traces)}",
            f"output={sum(trace.completion_tokens for trace in traces)}",
            f"finish={','.join(dict.fromkeys(trace.outcome for trace in traces))}",
            f"ttft={self._ttft(traces)}",
        ]

    def _ttft(self, traces: list[RequestTrace]) -> str:
        """From the request's arrival here; the engine's clock need not be ours."""
        firsts = [t.first_token - t.arrived for t in traces if t.first_token is not None]
        return _ms(self._queued_after + min(firsts)) if firsts else "-"


#: The entry of the request that the current task serves; unset when requests are not logged.
_entry: ContextVar[Entry] = ContextVar("access_log_entry")


def current_entry() -> Entry | None:
    return _entry.get(None)


def log_requests(find_trace: FindTrace) -> Middleware:
    """The outermost middleware, so that refusals are logged too.

    Args:
        find_trace: what the engine knows of a sequence, by its id; None when that is forgotten.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        entry = Entry(find_trace, request)
        _entry.set(entry)
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            entry.write(CLIENT_LEFT)
            raise
        if not entry.postponed:
            entry.write(response.status)
        return response

    return middleware


def _route(request: web.Request) -> str:
    """The path with its placeholders: clients choose what stands in their place."""
    resource = request.match_info.route.resource
    return _word(request.rel_url.raw_path if resource is None else resource.canonical)


def _word(text: str | None) -> str:
    return _UNPRINTABLE.sub("?", text or "")[:_MAX_WORD] or "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}ms"
