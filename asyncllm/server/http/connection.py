"""The port: aiohttp's connections with our own limits, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from aiohttp import StreamReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong, PayloadEncodingError
from aiohttp.streams import EMPTY_PAYLOAD

from asyncllm.server.http.bodies import IncompleteBody
from asyncllm.server.http.errors import HttpError, error_response
from asyncllm.server.http.half_close import PROBE, HalfClosed
from asyncllm.server.http.middleware import SERVER, from_http, new_request_id, request_id
from asyncllm.server.http.slow_clients import MERGE_BYTES, SlowAnswer, unread
from asyncllm.server.http.traffic import TRAFFIC, Traffic
from asyncllm.supervise.crowd import Use

log = logging.getLogger(__name__)

#: Limit of the request line, and of the name and the value of each header.
MAX_LINE_BYTES: Final = 8190
MAX_HEADERS: Final = 100
#: How long a refused body is still read, so that its sender sees the answer, not a reset.
LINGER_SECONDS: Final = 2.0


class Connection(web.RequestHandler):
    """One client's connection. It answers malformed requests itself.

    Attributes:
        first: pieces of the client's bytes that were read before.
        use: what it may be used for.
        half_closed: watches the client once it has closed its side.
    """

    __slots__ = ("_last_body", "_num_answered", "_traffic", "first", "half_closed", "use")

    def __init__(
        self, manager: web.Server, traffic: Traffic, use: Use = Use.FREELY, **options: Any
    ):
        super().__init__(manager, **options)
        self._traffic = traffic
        self._num_answered = 0
        self._last_body: StreamReader = EMPTY_PAYLOAD
        self.first: Sequence[bytes] = ()
        self.use = use
        self.half_closed: HalfClosed | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._traffic.crowd.num_open += 1
        self._traffic.crowd.rests(self)
        for piece in self.first:  # before the transport reads on
            if piece:
                self.data_received(piece)
        self.first = ()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:  # a request leaves them one turn before it is handled
            self._last_body = self._messages[-1][1]
        if self._is_answering():
            self._traffic.crowd.works(self)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio has it return a bool
        """The client has closed its side; True keeps the connection, for the pending answer."""
        if self.half_closed is not None:
            return True  # aiohttp has resumed reading, and met the end again
        if self.transport is not None and self.transport.get_extra_info("sslcontext") is not None:
            return False  # under TLS, an end is the end of both directions
        if self.transport is None or self._parser is None or not self._is_answering():
            return False
        try:
            self._parser.feed_eof()
        except PayloadEncodingError:
            # In the middle of a body. Whoever reads it ends the connection; a request that is
            # refused without its body gets its answer.
            end = IncompleteBody("the client has closed its side in the middle of it")
            self._last_body.set_exception(end)
        except HttpProcessingError:
            pass  # the answer to it is on its way
        self.half_closed = HalfClosed(self._loop, self.transport, self._probe)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.half_closed is not None:
            self.half_closed.stop()
        self._traffic.crowd.num_open -= 1
        self._traffic.crowd.works(self)
        super().connection_lost(exc)

    def leave(self) -> bool:
        """Close this connection, which is idle; False if a request is just coming."""
        transport = self.transport
        if transport is None or self._is_answering() or transport.get_write_buffer_size():
            return False
        if unread(transport):
            return False
        self.close_idle(transport)
        return True

    def close_idle(self, transport: asyncio.Transport) -> None:
        transport.abort()

    def _is_answering(self) -> bool:
        """Whether a request has arrived and is not answered yet.

        aiohttp notices the end of an answer one turn of the loop later, and a client that closes
        its side meanwhile would keep its connection.
        """
        return self._request_count > self._num_answered

    def _probe(self) -> bool:
        request = self._current_request
        probe = None if request is None else request.get(PROBE)
        return probe is not None and probe()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp calls this for bytes that are not HTTP, and for errors outside handlers.

        Raises:
            ConnectionError: an answer has begun already.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        error: Exception
        if isinstance(exc, UnicodeEncodeError):  # aiohttp repeats what the client has sent
            error = HttpError("a header of the request is not text", 400)
            self._traffic.refusals.count(error)
        elif status >= 500:
            log.error("a request failed outside its handler", exc_info=exc)
            error = HttpError("internal server error", status)
        else:
            error = _not_http(exc, status)
            self._traffic.refusals.count(error)
        return _unhandled(error_response(error))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """aiohttp calls this with every answer, also with those that no middleware saw."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = _unhandled(from_http(request, resp))
        ends = self.use is not Use.FREELY or self._traffic.crowd.is_leaving
        if ends or (self.half_closed is not None and not self._messages):
            resp.force_close()  # there is no next request
        # Streams watch their clients themselves; other answers only have to be written.
        watch = None
        if (length := resp.content_length or 0) > MERGE_BYTES and request.transport is not None:
            watch = SlowAnswer(request, request_id.get("-"), length, self._traffic.slow_clients)
        try:
            finished = await super().finish_response(request, resp, start_time)
        finally:
            if watch is not None:
                watch.stop()
        self._num_answered += 1
        if self.transport is not None and not self._is_answering():
            self._traffic.crowd.rests(self)
        if self.half_closed is not None and not self._messages:
            self.close()  # the client may have closed its side while the answer was written
        return finished


def _unhandled(response: web.Response) -> web.Response:
    """Adds what the middlewares would have added; the connection closes after this answer."""
    response.headers["X-Request-Id"] = new_request_id()
    response.headers[hdrs.SERVER] = SERVER
    response.force_close()
    return response


def _not_http(error: BaseException | None, status: int) -> HttpError:
    detail = error.message if isinstance(error, HttpProcessingError) else ""
    if isinstance(error, LineTooLong) or detail.startswith("Too many headers"):
        return HttpError(
            f"the request line or a header exceeds {MAX_LINE_BYTES} bytes, or there are more than "
            f"{MAX_HEADERS} headers",
            431,
        )
    what = detail.partition("\n")[0].rstrip(" :")
    return HttpError("not a valid HTTP request" + (f": {what}" if what else ""), status)


#: Makes connections that are not simply ``Connection``.
KIND: Final = web.AppKey[Callable[..., Connection]]("asyncllm_connection_kind")


def connector(
    server: web.Server, app: web.Application, request_seconds: float
) -> Callable[..., Connection]:
    """Makes the protocol of a new connection to ``app``, which ``server`` runs.

    Args:
        request_seconds: a connection without a whole request header is closed after this.

    Returns:
        A function that may be given the ``Use`` of the connection.
    """
    return partial(
        app.get(KIND, Connection),
        server,
        app.get(TRAFFIC) or Traffic(),
        loop=asyncio.get_running_loop(),
        access_log=None,  # as AppRunner passes it
        keepalive_timeout=request_seconds,
        lingering_time=min(request_seconds, LINGER_SECONDS),
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
        max_headers=MAX_HEADERS,
    )
