"""The port closes: whatever has come by then gets an answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import EngineDead
from asyncllm.server.app import create_app
from asyncllm.server.http.listener import Listener
from asyncllm.server.service import SERVICE
from asyncllm.supervise.listening import bind
from tests.support.server.fake_llm import FakeLLM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CLOSE_SECONDS = 2.0


def post(body: Any, *, length: int = 0) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(data)}"
    return f"{head}\r\n\r\n".encode() + data


GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = post({"prompt": "ab", "max_tokens": 2})


class Port:
    """A port of this loop."""

    def __init__(self, listener: Listener, llm: FakeLLM, app: Any):
        self.listener = listener
        self.llm = llm
        self.app = app
        self.is_closed = False
        self._clients: list[socket.socket] = []

    async def connect(self, sends: bytes = b"") -> socket.socket:
        """A client that has sent this; the server may not have read it."""
        client = socket.socket()
        client.setblocking(False)
        self._clients.append(client)
        await asyncio.get_running_loop().sock_connect(client, self.listener.address)
        if sends:
            client.send(sends)
        return client

    async def aclose(self, error: EngineDead | None = None) -> None:
        self.is_closed = True
        await self.listener.aclose(error)

    def close(self) -> None:
        for client in self._clients:
            client.close()


@asynccontextmanager
async def port() -> AsyncIterator[Port]:
    llm = FakeLLM()
    await llm.start()
    app = create_app(llm, ServerConfig())
    listener = Listener(app, request_seconds=20.0, close_seconds=CLOSE_SECONDS)
    await listener.start(bind("127.0.0.1", 0))
    opened = Port(listener, llm, app)
    try:
        yield opened
    finally:
        llm.resume()
        if not opened.is_closed:
            await opened.aclose()
        await llm.aclose()
        opened.close()


async def read(client: socket.socket, until: bytes = b"") -> bytes:
    """All that comes, or as far as this."""
    data = b""
    while not until or until not in data:
        more = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 65536), 20)
        if not more:
            break
        data += more
    return data


@pytest.mark.parametrize("request_bytes", [GET, POST])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_request_that_is_not_read_yet(request_bytes: bytes, is_first: bool) -> None:
    async with port() as opened:
        client = await opened.connect()
        if not is_first:
            client.send(GET)
            assert b"Connection: close" not in await read(client, b"}")
        await asyncio.sleep(0.05)  # for an idle connection
        client.send(request_bytes)
        await opened.aclose()
        answer = await read(client)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nConnection: close\r\n" in answer


async def test_a_connection_that_was_just_accepted() -> None:
    async with port() as opened:
        clients = [await opened.connect(POST) for _ in range(100)]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(opened.aclose())
        answers = [await read(client) for client in clients if client.fileno() >= 0]
        await closing
        # A few may be in the system's queue, of which the listening socket has been closed.
        assert {answer[:12] for answer in answers if answer} == {b"HTTP/1.1 200"}


async def test_new_requests_of_a_server_that_is_about_to_end_close_their_connections() -> None:
    async with port() as opened:
        opened.app[SERVICE].draining = True
        client = await opened.connect(POST)
        answer = await read(client)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"\r\nConnection: close\r\n" in answer


@pytest.mark.parametrize("is_dead", [True, False])
async def test_a_request_that_is_not_done_in_time_is_told_why(is_dead: bool) -> None:
    async with port() as opened:
        opened.llm.hold()
        waiting = await opened.connect(POST)
        half = await opened.connect(post({"prompt": "ab"}, length=1000))
        await asyncio.sleep(0.2)  # neither will be done, however long it takes
        error = EngineDead("planted") if is_dead else None
        await opened.aclose(error)
        for client in (waiting, half):
            answer = await read(client)
            assert answer.startswith(b"HTTP/1.1 503"), answer
            code = b"engine_dead" if is_dead else b"not_ready"
            assert b'"code":"%b"' % code in answer
            assert b"\r\nRetry-After: " in answer


async def test_idle_connections_do_not_hold_it_up() -> None:
    async with port() as opened:
        clients = [await opened.connect() for _ in range(10)]
        asked = await opened.connect(GET)
        await read(asked, b"}")
        began = time.monotonic()
        await opened.aclose()
        assert time.monotonic() - began < CLOSE_SECONDS / 2
        for client in (*clients, asked):
            assert await read(client) == b""
