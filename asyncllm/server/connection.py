"""The port: aiohttp's connections with limits of our own, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import termios
from array import array
from contextlib import suppress
from functools import partial
from typing import Final

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from asyncllm.server.errors import HttpError, error_response
from asyncllm.server.middleware import SERVER, from_http, new_request_id
from asyncllm.server.sse import GIVE_UP_SECONDS, MERGE_BYTES

log = logging.getLogger(__name__)

BACKLOG: Final = 2048
#: Of the request line, and of the name and the value of each header.
MAX_LINE_BYTES: Final = 8190
MAX_HEADERS: Final = 100
#: How long a body that was refused is read on, lest its sender see a broken connection instead.
LINGER_SECONDS: Final = 2.0
#: How often clients are looked after that have much to read.
WATCH_SECONDS: Final = 0.5


class Connection(web.RequestHandler):
    """One client's connection. It answers itself what never reaches the app."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp calls when bytes are no HTTP, or something failed outside every handler.

        Raises:
            ConnectionError: part of an answer is on its way already.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if status >= 500:
            log.error("a request failed outside its handler", exc_info=exc)
            error: Exception = HttpError("internal server error", status)
        else:
            error = _not_http(exc, status)
        return _unhandled(error_response(error))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """What aiohttp calls with every answer; it makes some itself, without any middleware."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = _unhandled(from_http(request, resp))
        if (resp.content_length or 0) <= MERGE_BYTES or self.transport is None:
            return await super().finish_response(request, resp, start_time)
        # Streams have seen to that themselves; and all that is left to be done is to write.
        watch = _Watch(self._loop, self.transport)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            watch.stop()


class _Watch:
    """Breaks a connection off whose client takes no byte of what is written for so long."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport):
        self._loop = loop
        self._transport = transport
        self._unsent = -1
        self._taken_at = 0.0
        self._look()

    def _look(self) -> None:
        unsent, now = _unsent(self._transport), self._loop.time()
        if unsent != self._unsent:
            self._unsent, self._taken_at = unsent, now
        elif now - self._taken_at > GIVE_UP_SECONDS:
            log.info("a client reads too slowly")
            self._transport.abort()
        self._timer = self._loop.call_later(WATCH_SECONDS, self._look)

    def stop(self) -> None:
        self._timer.cancel()


def _unsent(transport: asyncio.Transport) -> int:
    """Bytes that the client has not taken yet: ours, and the system's as far as it tells.

    It takes more from us only when a good part of its own, megabytes, is gone.
    """
    queued = array("i", [0])
    with suppress(OSError, ValueError):  # it is closed
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + queued[0]


def _unhandled(response: web.Response) -> web.Response:
    """An answer with what middlewares would have added; the last one of its connection."""
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


class Listener:
    """An application on a port. ``aclose`` it also when ``start`` has failed."""

    def __init__(
        self,
        app: web.Application,
        *,
        request_seconds: float,
        close_seconds: float,
        handler_cancellation: bool = True,
    ):
        """
        Args:
            request_seconds: until a connection is closed that brings no whole request header.
            close_seconds: how long ``aclose`` waits for handlers, before and after it cancels them.
            handler_cancellation: whether a client's disconnection cancels its handler.
        """
        self._runner = web.AppRunner(
            app, handler_cancellation=handler_cancellation, shutdown_timeout=close_seconds
        )
        self._request_seconds = request_seconds
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """
        Raises:
            OSError, OverflowError: it cannot listen there.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        connect = partial(
            Connection,
            self._runner.server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # as AppRunner passes it
            keepalive_timeout=self._request_seconds,
            lingering_time=min(self._request_seconds, LINGER_SECONDS),
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._server = await loop.create_server(connect, host, port, backlog=BACKLOG)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port that it listens on."""
        assert self._server is not None
        host, port, *_ = self._server.sockets[0].getsockname()
        return host, port

    async def aclose(self) -> None:
        """Take no more connections, end what is left of the others."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
