"""When the engine dies, requests that are not answered yet pass to the next server.

The process is healthy then: it gives each such connection, with the bytes of its request, to the
process that supervises it, which gives both to the next server. For the client, its answer is late.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiohttp import web

from asyncllm.server.http.connection import KIND, Connection
from asyncllm.server.http.middleware import HAND_OVER
from asyncllm.supervise.child import Parent

#: Bytes that are kept of one request, and of all.
MOST_OF_ONE: Final = 2**20
MOST_OF_ALL: Final = 64 * 2**20


class Room:
    """Bounds the bytes that are kept."""

    def __init__(self, most: int = MOST_OF_ALL):
        self.left = most


class Received:
    """The bytes that a connection has sent since its last answer, if there was room for them.

    Attributes:
        is_second: the connection came from another server: whose engine this request may have
            killed, and so it is not passed on again.
    """

    __slots__ = ("_data", "_room", "is_second")

    def __init__(self, room: Room):
        self._room = room
        self._data: bytearray | None = bytearray()
        self.is_second = False

    def add(self, data: bytes) -> None:
        if self._data is None:
            return
        if len(self._data) + len(data) > MOST_OF_ONE or len(data) > self._room.left:
            self.drop()
            return
        self._room.left -= len(data)
        self._data += data

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come since the last answer."""
        return self._data is not None and not self._data

    def drop(self) -> None:
        """Keep nothing more of this request."""
        if self._data is not None:
            self._room.left += len(self._data)
        self._data = None

    def clear(self) -> None:
        """The request is answered: keep the next one."""
        self.drop()
        self._data = bytearray()
        self.is_second = False

    def whole(self, request: web.Request) -> bytes | None:
        """The bytes of ``request``, if they are all that was received, and nothing else was."""
        if self._data is None:
            return None
        head, end, body = bytes(self._data).partition(b"\r\n\r\n")
        line = f"{request.method} {request.raw_path} HTTP/".encode("utf-8", "surrogateescape")
        is_whole = bool(end) and head.startswith(line) and request.content_length == len(body)
        return head + end + body if is_whole else None


class HandOver:
    """Gives connections to the parent process."""

    def __init__(self, parent: Parent, has_died: Callable[[], bool]):
        """``has_died``: whether another server will follow this one."""
        self.room = Room()
        self._parent = parent
        self._has_died = has_died

    def pass_on(self, request: web.Request) -> bool:
        """Give a request's connection away; False if it must be answered here."""
        received: Received | None = getattr(request.protocol, "received", None)
        transport = request.transport
        if received is None or transport is None or transport.is_closing():
            return False
        if received.is_second or not self._has_died() or request.method != "POST":
            return False
        if request.writer.output_size > 0 or transport.get_extra_info("sslcontext") is not None:
            return False  # the client has some of its answer; TLS state cannot be passed on
        data = received.whole(request)
        if data is None:
            return False
        try:
            file = os.memfd_create("request", os.MFD_CLOEXEC)
        except OSError:
            return False
        try:
            with open(file, "wb", closefd=False) as writable:
                writable.write(data)
            with suppress(OSError):
                self._parent.hand_over(transport.get_extra_info("socket").fileno(), file)
                transport.abort()  # the parent has the connection as well: it stays open
                return True
        finally:
            os.close(file)
        return False

    def pass_idle(self, transport: asyncio.Transport) -> None:
        """Give away a connection whose client may just be sending a request, if it should go on."""
        if self._has_died() and transport.get_extra_info("sslcontext") is None:
            with suppress(OSError):
                self._parent.hand_over(transport.get_extra_info("socket").fileno())


def is_second(protocol: asyncio.BaseProtocol) -> None:
    """The connection is one that was handed over."""
    if isinstance(received := getattr(protocol, "received", None), Received):
        received.is_second = True


async def forget(request: web.Request, response: web.StreamResponse) -> None:
    """An ``on_response_prepare`` signal: an answer begins, so nothing has to be kept."""
    received: Received | None = getattr(request.protocol, "received", None)
    if received is not None:
        received.drop()


class KeptConnection(Connection):
    """Keeps the bytes of a request until its answer begins."""

    __slots__ = ("_hand_over", "received")

    def __init__(self, *args: Any, hand_over: HandOver, **options: Any):
        super().__init__(*args, **options)
        self._hand_over = hand_over
        self.received = Received(hand_over.room)

    def data_received(self, data: bytes) -> None:
        self.received.add(data)
        super().data_received(data)

    def close_idle(self, transport: asyncio.Transport) -> None:
        if self.received.is_empty:
            self._hand_over.pass_idle(transport)
        super().close_idle(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.received.drop()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        finished = await super().finish_response(request, resp, start_time)
        if self.transport is not None:
            self.received.clear()
        return finished


def add_hand_over(app: web.Application, parent: Parent, has_died: Callable[[], bool]) -> None:
    """To be called before the application serves."""
    hand_over = HandOver(parent, has_died)
    app[HAND_OVER] = hand_over.pass_on
    kind: Callable[..., Connection] = partial(KeptConnection, hand_over=hand_over)
    app[KIND] = kind
    app.on_response_prepare.append(forget)
