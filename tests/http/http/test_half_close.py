"""Clients that send no more: who waits for an answer gets it, who has gone is noticed soon."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from asyncllm.server.http import half_close
from tests.support.server.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/completions": {"prompt": "abc"},
    "/api/generate": {"model": "fake", "prompt": "abc"},
}
#: How long a client that is gone may keep its place. On a quiet machine it is some milliseconds.
SOON = 1.0


@pytest.fixture(scope="module", params=[asyncio.new_event_loop, uvloop.new_event_loop])
def each_loop(request: pytest.FixtureRequest) -> Iterator[Server]:
    new_loop: Callable[[], asyncio.AbstractEventLoop] = request.param
    with serving(new_loop=new_loop) as server:
        yield server
        server.until_idle()


@pytest.fixture
def held(each_loop: Server) -> Iterator[Server]:
    """A server whose engine makes no step."""
    each_loop.call(each_loop.llm.hold)
    yield each_loop
    each_loop.call(each_loop.llm.resume)
    each_loop.until_idle()


def ask(server: Server, path: str, stream: bool, version: str = "1.1") -> socket.socket:
    """Send a request, and wait until the engine has it."""
    before = server.call(lambda: len(server.llm.params))
    client = server.open(path, {**REQUESTS[path], "stream": stream}, version=version)
    server.until(lambda: len(server.llm.params) == before + 1)
    return client


def answer_of(client: socket.socket) -> bytes:
    """The body, read as Python's own client reads it."""
    time.sleep(0.05)
    assert client.recv(1 << 16, socket.MSG_PEEK).count(b" 100 Continue") <= 1
    response = http.client.HTTPResponse(client)
    response.begin()
    assert response.status == 200
    body = response.read()
    assert client.recv(1) == b"", "the connection is closed behind the answer"
    return body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_a_client_that_waits_gets_the_answer(held: Server, path: str, stream: bool) -> None:
    with ask(held, path, stream) as client:
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.3)  # for several looks, and a probe
        assert not held.call(lambda: held.llm.stats.finished["abort"])
        held.call(held.llm.resume)
        body = answer_of(client).decode()
    if not stream:
        assert json.loads(body)
    elif path.startswith("/v1"):
        assert ":\n\n" in body, "it was probed"
        assert body.endswith("data: [DONE]\n\n")
    else:
        *lines, rest = body.split("\n")
        assert rest == ""
        assert json.loads(lines[-1])["done"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_with_the_request_gets_the_answer(
    each_loop: Server, stream: bool
) -> None:
    """The end of the input arrives together with the request."""
    body = json.dumps({"prompt": "abc", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", each_loop.port), timeout=10) as client:
            client.sendall(head.encode() + body)
            client.shutdown(socket.SHUT_WR)
            assert b"abc" in answer_of(client) if not stream else b"[DONE]" in answer_of(client)


def test_a_stream_over_http_1_0(held: Server) -> None:
    with ask(held, "/v1/completions", stream=True, version="1.0") as client:
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
        held.call(held.llm.resume)
        assert client.makefile("rb").read().endswith(b"data: [DONE]\n\n")


def test_all_requests_that_came_before_the_end_are_answered(each_loop: Server) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", each_loop.port), timeout=10) as client:
        client.sendall(3 * request)
        client.shutdown(socket.SHUT_WR)
        assert client.makefile("rb").read().count(b"HTTP/1.1 200 OK") == 3


def close(client: socket.socket) -> None:
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_is_noticed(
    held: Server, stream: bool, version: str, leave: Callable[[socket.socket], None]
) -> None:
    client = ask(held, "/v1/chat/completions", stream, version)
    before = held.call(lambda: len(held.llm.aborted))
    leave(client)
    held.until(lambda: len(held.llm.aborted) == before + 1, SOON)
    assert held.llm.stats.running == held.llm.stats.waiting == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_after_half_closing_is_noticed(
    held: Server, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_close, "PROBE_SECONDS", 0.05)
    client = ask(held, "/v1/chat/completions", stream)
    before = held.call(lambda: len(held.llm.aborted))
    client.shutdown(socket.SHUT_WR)
    time.sleep(0.2)
    assert len(held.llm.aborted) == before
    client.close()
    held.until(lambda: len(held.llm.aborted) == before + 1, 2 * SOON)


def test_the_end_within_a_body_ends_the_connection(each_loop: Server) -> None:
    before = len(each_loop.llm.params)
    with socket.create_connection(("127.0.0.1", each_loop.port), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        time.sleep(0.05)
        client.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
        assert time.monotonic() - began < SOON
    assert len(each_loop.llm.params) == before


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["no host", "two lengths", "bad url"],
)
def test_bytes_that_are_not_http_are_answered(
    each_loop: Server, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", each_loop.port), timeout=10) as client:
        client.sendall(request_)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            while received := client.recv(1 << 16):
                answer += received
    assert b" 400 Bad Request" in answer.split(b"\r\n\r\n")[-2]
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_client_that_leaves_with_its_answer_leaves_nothing_behind(each_loop: Server) -> None:
    """Its end may arrive in the turn of the loop in which the answer is done."""
    request = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{"
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", each_loop.port), timeout=10) as client:
            client.sendall(request)
            assert client.recv(1000).startswith(b"HTTP/1.1 400 ")
    end = time.monotonic() + 5
    while kept := closed_by_the_client(each_loop.port):
        assert time.monotonic() < end, f"{kept} connections are kept"
        time.sleep(0.05)


def closed_by_the_client(port: int) -> int:
    """Connections that the client has closed, and the server has not (CLOSE_WAIT)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "08" for row in rows)
