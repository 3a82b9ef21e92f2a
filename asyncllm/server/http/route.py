"""Route: one operation of the API, as the application serves it and as it is described."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from asyncllm.server.http.errors import ErrorBody, error_response

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import msgspec
    from aiohttp.typedefs import Handler

    from asyncllm.server.http.errors import ErrorWriter

#: What routes refuse that take JSON, and those among them that generate.
TAKES_JSON: Final = (400, 404, 408, 413, 415, 503)
GENERATES: Final = (*TAKES_JSON, 429, 500)

EVENT_STREAM: Final = "text/event-stream"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One operation of the API.

    Attributes:
        body: what it takes, if anything.
        answers: one of them is what it answers; none: text that is no JSON.
        event: what each event of a stream carries, where the body may ask for a stream: a Struct,
            or a union of them.
        named_events: whether events have names, and the stream ends without ``[DONE]``.
        stream_type: of a stream; what is no event stream has a line of JSON for each event.
        error: the body of refusals.
        query: parameters of the URL, with the values they may have, or with a schema.
        refusals: what it may refuse a request with, besides 401.
        write_error: makes such an answer.
        refers: what fields refer to that are checked one by one.
        needs_key: whether it is closed to clients without an API key, when there are keys.
    """

    method: str
    path: str
    handler: Handler
    summary: str
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
