"""An application on a port: from the first connection to the last answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web

from asyncllm.errors import AsyncLLMError, NotReady
from asyncllm.server.http.acceptor import Acceptor
from asyncllm.server.http.connection import Connection, connector
from asyncllm.server.http.traffic import TRAFFIC, Traffic
from asyncllm.supervise.crowd import Use
from asyncllm.supervise.tls import Tls

#: How often connections are checked while the port closes.
CHECK_SECONDS: Final = 0.01


class Listener:
    """An application on a port."""

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
            request_seconds: a connection without a whole request header is closed after this.
            close_seconds: how long ``aclose`` waits for answers, before and after it ends handlers.
            handler_cancellation: whether a client's disconnection cancels its handler.
        """
        self._runner = web.AppRunner(
            app, handler_cancellation=handler_cancellation, shutdown_timeout=close_seconds / 2
        )
        self._close_seconds = close_seconds
        self._app = app
        self._request_seconds = request_seconds
        self._traffic = app.get(TRAFFIC) or Traffic()
        self._acceptor: Acceptor | None = None

    async def start(self, sockets: Sequence[socket.socket], tls: Tls | None = None) -> None:
        """Accept connections; ``sockets`` listen, do not block, and belong to this object now."""
        await self._runner.setup()
        assert self._runner.server is not None
        self._connect = connector(self._runner.server, self._app, self._request_seconds)
        crowd, waits = self._traffic.crowd, self._traffic.accept_waits
        self._acceptor = Acceptor(sockets, self._connect, crowd, waits, tls)

    def adopt(
        self,
        connection: socket.socket,
        pieces: Sequence[bytes],
        attached: Callable[[Connection], None],
        failed: Callable[[], None],
    ) -> None:
        """Serve a connection that another process has accepted, and has read a request from.

        Args:
            pieces: what it has read.
            attached: called with its protocol, before that gets the request.
            failed: called if the connection cannot be served.
        """
        assert self._acceptor is not None
        connect = self._connect

        def connect_it(use: Use) -> Connection:
            protocol = connect(use)
            protocol.first = pieces
            attached(protocol)
            return protocol

        self._acceptor.adopt(connection, connect_it, failed)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port that it listens on."""
        assert self._acceptor is not None
        return self._acceptor.address

    def leave(self) -> None:
        """Connections end with their next answers: the port closes soon."""
        self._traffic.crowd.is_leaving = True

    async def aclose(self, error: AsyncLLMError | None = None) -> None:
        """Accept no more connections, and close the others.

        Args:
            error: what requests are told that have come, and are not answered in time.
        """
        if self._acceptor is not None:
            await self._acceptor.aclose()
            self.leave()
            await self._until_closed()
            self._traffic.unanswered.end(error or NotReady("the server is shutting down"))
            await self._until_closed()
        await self._runner.cleanup()

    async def _until_closed(self) -> None:
        """Close connections when they are idle, until none is left or half the time is up.

        What a client has sent by then is read, and answered: it is not to find its connection
        closed instead.
        """
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + self._close_seconds / 2
        while loop.time() < until and (connections := self._runner.server.connections):
            for connection in connections:
                if isinstance(connection, Connection):
                    connection.leave()
            await asyncio.sleep(CHECK_SECONDS)
