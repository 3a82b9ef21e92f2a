"""Requests to an application without a socket: its own HTTP parser reads them, h11 the answers."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Final, Self

import h11
from aiohttp import web

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.app import create_app
from asyncllm.server.arrivals.forwarding import answer_seek
from asyncllm.server.arrivals.routed import add_number
from asyncllm.server.http.browsers import guard
from asyncllm.server.http.connection import connector
from asyncllm.server.model import Model
from asyncllm.supervise.front.hosts import hosts_of

Headers = list[tuple[bytes, bytes]]

#: Limit of the headers of an answer.
MAX_HEAD_BYTES: Final = 256 * 1024
#: The server gets a body in pieces of this size, so that it can stop reading.
PIECE_BYTES: Final = 64 * 1024
#: The writer is paused above this, as by asyncio's transports.
HIGH_WATER: Final = 64 * 1024
#: How long closing waits for handlers, before and after it cancels them.
CLOSE_SECONDS: Final = 0.1

#: Headers of one connection, which do not belong to the next one.
_OF_A_CONNECTION: Final = frozenset(
    (b"connection", b"expect", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade")
)


class InProcess:
    """The HTTP API for code in this process, on the event loop that the model was started on.

    Each request has a connection of its own, which is what ``asyncllm serve`` has on a socket: the
    same parser, limits, middlewares, and rules for slow and for leaving clients.
    """

    def __init__(
        self,
        llm: Model,
        config: ServerConfig,
        replica: int | None = None,
        *,
        is_guarded: bool = False,
    ):
        """Starting and closing the model stays with the caller. Raises like ``create_app``.

        Args:
            replica: which of several this is, if there are several.
            is_guarded: what browsers send is judged here, and not by a host application.
        """
        self._app = app = create_app(llm, config)
        if is_guarded and (hosts := hosts_of(config)) is not None:
            app.middlewares.append(guard(hosts, config.cors_origin))
        if replica is not None:
            add_number(app, replica)
            app.middlewares.append(answer_seek)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)
        self._request_seconds = config.request_seconds
        self._starting = asyncio.Lock()

    async def open(self, peer: tuple[str, int] | None = None) -> Exchange:
        """A new connection, for one request. ``peer`` is the client's host and port."""
        if self._runner.server is None:
            async with self._starting:
                if self._runner.server is None:
                    await self._runner.setup()
        assert self._runner.server is not None
        connect = connector(self._runner.server, self._app, self._request_seconds)
        return Exchange(Pipe(connect, peer))

    async def aclose(self) -> None:
        """End the requests that still run. Idempotent."""
        await self._runner.cleanup()


class Exchange:
    """One request and its answer, as the client sees them. Leaving the context disconnects."""

    def __init__(self, pipe: Pipe):
        self._pipe = pipe
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    def send_head(
        self, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        """Send the request line and the headers, except those of a connection.

        Raises:
            h11.LocalProtocolError: that is not HTTP.
        """
        kept = [header for header in headers if header[0].lower() not in _OF_A_CONNECTION]
        if not any(name.lower() == b"host" for name, _ in kept):
            kept.append((b"host", b"asyncllm"))
        kept.append((b"connection", b"close"))
        self._send(h11.Request(method=method, target=target, headers=kept))

    async def send_body(self, body: bytes) -> bool:
        """Send a part of the body; False once the server no longer reads it.

        Raises:
            h11.LocalProtocolError: it is longer than the headers say.
        """
        for start in range(0, len(body), PIECE_BYTES):
            if not await self._pipe.writable():
                return False
            self._send(h11.Data(data=body[start : start + PIECE_BYTES]))
        return True

    def end_body(self) -> None:
        """
        Raises:
            h11.LocalProtocolError: it is shorter than the headers say.
        """
        self._send(h11.EndOfMessage())

    async def head(self) -> tuple[int, Headers]:
        """The status and the headers of the answer.

        Raises:
            ConnectionError: the server has ended the connection.
        """
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event.status_code, list(event.headers)
            if not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError("the server sent no answer")

    async def body(self) -> AsyncIterator[bytes]:
        """The answer's body as it arrives. Raises like ``head``."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    def disconnect(self) -> None:
        """Leave, which cancels the request if it still runs. Idempotent."""
        self._pipe.disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.disconnect()

    def _send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        if data := self._http.send(event):
            self._pipe.send(data)

    async def _next(self) -> object:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._pipe.receive())
        except h11.RemoteProtocolError as error:
            raise ConnectionResetError("the answer is incomplete") from error
        return event


async def ask(
    exchange: Exchange,
    method: bytes,
    target: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    body: AsyncIterable[bytes],
) -> tuple[int, Headers]:
    """Send a whole request; returns the status and the headers of its answer.

    Raises:
        h11.LocalProtocolError, ConnectionError: see ``Exchange``.
    """
    exchange.send_head(method, target, headers)
    async for part in body:
        if not await exchange.send_body(part):
            break
    else:
        exchange.end_body()
    return await exchange.head()


class Pipe(asyncio.Transport):
    """The server's transport. The client's end of it is ``send``, ``receive`` and ``disconnect``.

    What the client has not received yet counts as unsent, so a slow client is treated as one on a
    socket is.
    """

    def __init__(self, connect: Callable[[], asyncio.Protocol], peer: tuple[str, int] | None):
        """
        Args:
            connect: makes the server's protocol.
            peer: the client's host and port, as far as they are known.
        """
        super().__init__({"peername": peer})
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()
        self._closing = False
        self._lost = False
        self._aborted = False
        self._accepts = True  # the server reads
        self._paused = False  # the server should not write
        self._changed = asyncio.Event()
        self._protocol = connect()
        # As on a socket, handlers see none of the client's context variables.
        contextvars.Context().run(self._protocol.connection_made, self)

    # -- the client's end ------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Give the server bytes; nothing happens once it has closed."""
        if not self._closing:
            self._protocol.data_received(data)

    async def writable(self) -> bool:
        """Wait until the server reads; False if it has answered, or closed, instead."""
        while not (self._accepts or self._unread or self._closing):
            await self._change()
        return not (self._unread or self._closing)

    async def receive(self) -> bytes:
        """All that the server has written; empty at the end.

        Raises:
            ConnectionResetError: the connection was aborted.
        """
        while not self._unread:
            if self._aborted:
                raise ConnectionResetError("the connection was closed")
            if self._closing:
                return b""
            await self._change()
        data = bytes(self._unread)
        self._unread.clear()
        if self._paused:
            self._paused = False
            if not self._lost:
                self._protocol.resume_writing()
        return data

    def disconnect(self) -> None:
        """The client leaves; idempotent."""
        self.abort()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # -- the server's end: what asyncio.Transport says -------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing:
            return
        self._unread += data
        if len(self._unread) > HIGH_WATER and not self._paused:
            self._paused = True
            self._protocol.pause_writing()
        self._changed.set()

    def get_write_buffer_size(self) -> int:
        return len(self._unread)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """No more is written; the client can still receive what was."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._lose)
            self._changed.set()

    def abort(self) -> None:
        if not self._lost:
            self._aborted = True
            self._unread.clear()
        self.close()

    def _lose(self) -> None:
        self._lost = True
        self._protocol.connection_lost(None)

    def pause_reading(self) -> None:
        self._accepts = False

    def resume_reading(self) -> None:
        self._accepts = True
        self._changed.set()
