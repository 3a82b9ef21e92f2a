"""Route: one operation of the API, as the application serves it and as it is described."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from asyncllm.server.http.errors import ErrorBody, ErrorWriter, error_response

#: Statuses of refusals: of routes that take JSON, and of those among them that generate.
TAKES_JSON: Final = (400, 404, 408, 413, 415, 503)
GENERATES: Final = (*TAKES_JSON, 429, 500)

EVENT_STREAM: Final = "text/event-stream"


@dataclass(frozen=True)
class Route:
    """One operation of the API.

    Attributes:
        body: type of the request body.
        answers: types of the answer, one of several; without any, the answer is plain text.
        event: type of a stream's events, or a union; None if the route does not stream.
        named_events: whether events have names, and the stream ends without ``[DONE]``.
        stream_type: content type of a stream; other than event streams, it is lines of JSON.
        error: type of the body of refusals.
        query: parameters of the URL, with their possible values or their schema.
        refusals: possible statuses of refusals, besides 401.
        write_error: makes a refusal.
        refers: types that the description refers to, of fields which are checked one by one.
        needs_key: whether clients need an API key, when the server has keys.
        asks: what all of several replicas are asked for an answer; empty if one answers by itself.
        home: which of several replicas has what the path names; None if that does not say.
        came: when this replica got what has this name, in seconds; None if it does not have it.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    _: KW_ONLY
    body: type[msgspec.Struct] | None = None
    answers: tuple[type[msgspec.Struct], ...] = ()
    event: Any = None
    named_events: bool = False
    stream_type: str = EVENT_STREAM
    error: type[msgspec.Struct] = ErrorBody
    query: Mapping[str, Sequence[str] | dict[str, Any]] = field(default_factory=dict)
    refusals: Sequence[int] = ()
    write_error: ErrorWriter = error_response
    refers: tuple[type[msgspec.Struct], ...] = ()
    needs_key: bool = True
    asks: str = ""
    home: Callable[[str], int | None] | None = None
    came: Callable[[web.Request, str], float | None] | None = None


#: The routes of an application, by their handlers.
BY_HANDLER: Final = web.AppKey("asyncllm_routes", dict[Handler, Route])
