"""GET /live: what the engine does now and why requests wait; and single requests by their number.

A view is made at most once in INTERVAL_SECONDS, however many clients ask, and is bounded in size.
It never has text of prompts or answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiohttp import web

from asyncllm.errors import EngineDead, NotFound, NotReady
from asyncllm.server.arrivals.names import NUMBERS, Numbers, is_number
from asyncllm.server.http.answer import encode, json_response
from asyncllm.server.http.traffic import Waits
from asyncllm.server.limits.api_keys import has_key, tenant_of
from asyncllm.server.metrics.server import PAGE
from asyncllm.server.native.admin import trace_response
from asyncllm.server.native.live_answers import INTERVAL_SECONDS, MOST_ROWS, live_state
from asyncllm.server.native.schemas import Aborted
from asyncllm.server.request_log import Served
from asyncllm.server.service import SERVICE, Service

if TYPE_CHECKING:
    from asyncllm.engine.requests.view import LiveView


class LiveFeed:
    """Makes views of one service, and encodes them for each viewer."""

    def __init__(self, service: Service, lag: Waits, clock: Callable[[], float] = time.monotonic):
        self._service = service
        self._lag = lag
        self._clock = clock
        self._view: LiveView | None = None
        self._made_at = 0.0
        self._bodies: dict[str | None, bytes] = {}

    def body(self, viewer: str | None, numbers: Numbers) -> bytes:
        """JSON of a ``LiveState``.

        Args:
            viewer: the tenant whose requests are shown; None for all.
            numbers: make ids.

        Raises:
            EngineDead, NotReady: there is nothing to be seen.
        """
        llm = self._service.llm
        if not llm.healthy:
            raise EngineDead("the engine has stopped")
        if not llm.ready:
            raise NotReady("the model is still loading")
        now = self._clock()
        view = self._view
        if view is None or now - self._made_at >= INTERVAL_SECONDS:
            view = self._view = llm.view(MOST_ROWS)
            self._made_at = now
            self._bodies.clear()
        body = self._bodies.get(viewer)
        if body is None:
            state = live_state(self._service, view, viewer, self._lag, numbers)
            body = self._bodies[viewer] = encode(state)
        return body


LIVE_FEED: Final = web.AppKey("asyncllm_live_feed", LiveFeed)


def add_live(app: web.Application) -> None:
    app[LIVE_FEED] = LiveFeed(app[SERVICE], app[PAGE].measured.lag)


async def live(request: web.Request) -> web.Response:
    body = request.app[LIVE_FEED].body(_viewer(request), request.app[NUMBERS])
    headers = {"Cache-Control": "no-store"}
    return web.Response(body=body, content_type="application/json", headers=headers)


async def live_trace(request: web.Request) -> web.Response:
    """The trace of a request by the number of one of its sequences."""
    service, viewer = request.app[SERVICE], _viewer(request)
    number, served = _find(request)
    traces = service.traces(served) if served is not None else []
    if not traces and (trace := service.llm.trace(number)) is not None:
        traces = [(0, trace)]  # a request of the program itself
    name = request.match_info["id"] if served is None else served.names[0]
    seen = [each for each in traces if viewer is None or each[1].tenant == viewer]
    return trace_response(name, seen)


async def live_abort(request: web.Request) -> web.Response:
    """End a request by the number of one of its sequences; its client gets the answer so far."""
    service, viewer = request.app[SERVICE], _viewer(request)
    _, served = _find(request)
    may = served is not None and (viewer is None or served.tenant == viewer)
    if served is None or not may or not service.live.abort(served):
        raise NotFound(f"no request {request.match_info['id']} is being served", param="id")
    return json_response(Aborted(id=served.names[0], aborted=True))


def _viewer(request: web.Request) -> str | None:
    """Whose requests the client may see; None for all, which those with the admin key see.

    Raises:
        Unauthorized: it has none of the keys.
    """
    service = request.app[SERVICE]
    admin_key = service.config.admin_key
    if not service.keys or (admin_key is not None and has_key(request, admin_key)):
        return None
    service.keys.admit(request)
    return tenant_of(request)


def _find(request: web.Request) -> tuple[int, Served | None]:
    """The number in the path, as the engine has it, and the request that it belongs to.

    Raises:
        NotFound: it is not a number.
    """
    text = request.match_info["id"]
    if not is_number(text):
        raise NotFound(f"{text!r} is not the number of a request", param="id")
    number = request.app[NUMBERS].here(int(text))
    if number is None:
        return -1, None
    return number, request.app[SERVICE].log.find_sequence(number)
