"""What is known of a request for those who are told when it has ended, and its line in the log.

The line has tenant, model, tokens, times and errors, but never text.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncllm.engine.requests.history import RequestTrace
from asyncllm.engine.tenants import tenant_label
from asyncllm.errors import AsyncLLMError
from asyncllm.server.http.middleware import FAILURE, request_id
from asyncllm.server.limits.api_keys import tenant_of
from asyncllm.system.json_log import fields
from asyncllm.types import SamplingParams

FindTrace = Callable[[int], RequestTrace | None]
Observer = Callable[["Entry"], None]

log = logging.getLogger(__name__)

#: nginx's status for a client that left before its answer was complete.
CLIENT_LEFT: Final = 499
#: Clients choose some of the words; none may break the line or fill the log.
_UNPRINTABLE: Final = re.compile(r"[^\x21-\x7e]")
_MAX_WORD: Final = 100
#: Stands in a line for what is not known.
_UNKNOWN: Final = "-"


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


def log_request(entry: Entry) -> None:
    """Log a request that has ended; not probes and scrapes."""
    if entry.is_probe:
        return
    head = {
        "id": request_id.get(),
        "method": entry.request.method,
        "route": _word(entry.route),
        "status": entry.status,
    }
    tenant = tenant_of(entry.request)
    work, error = _work(entry), _error(entry)
    named = {"model": _word(entry.model), "tenant": _word(tenant), **work, **error}
    named["total_ms"] = _ms(entry.seconds)
    words = [str(value) for value in head.values()]
    for name, value in named.items():
        short, unit = (name[:-3], "ms") if name.endswith("_ms") else (name, "")
        words.append(f"{short}={_UNKNOWN}" if value is None else f"{short}={value}{unit}")
    head.pop("id")  # every line in JSON has it
    known = {name: value for name, value in named.items() if value != _UNKNOWN}
    known["tenant"] = tenant_label(tenant)
    log.info("request %s", " ".join(words), extra=fields("request", head | known))


def _work(entry: Entry) -> dict[str, Any]:
    """What the engine did; None where it no longer knows."""
    traces = entry.traces()
    if traces is None:
        return {}
    if not traces:
        return dict.fromkeys(("prompt", "cached", "output", "finish", "ttft_ms"))
    return {
        "prompt": sum(trace.prompt_tokens for trace in traces),
        "cached": sum(trace.cached_tokens for trace in traces),
        "output": sum(trace.completion_tokens for trace in traces),
        "finish": ",".join(dict.fromkeys(trace.outcome for trace in traces)),
        "ttft_ms": _ttft_ms(entry, traces),
    }


def _ttft_ms(entry: Entry, traces: list[RequestTrace]) -> float | None:
    """From the request's arrival here; the engine's clock need not be ours."""
    firsts = [t.first_token - t.arrived for t in traces if t.first_token is not None]
    return _ms(entry.queued_after + min(firsts)) if firsts else None


def _error(entry: Entry) -> dict[str, Any]:
    error = entry.failure
    if not isinstance(error, AsyncLLMError):
        return {}
    return {"error": error.type, "code": _word(error.code), "param": _word(error.param)}


def _word(text: str | None) -> str:
    return _UNPRINTABLE.sub("?", text or "")[:_MAX_WORD] or _UNKNOWN


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
