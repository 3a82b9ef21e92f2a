"""Many large bodies at once: memory for so many, the others wait their turn."""

from __future__ import annotations

import gc
import http.client
import json
import re
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.server.http import bodies
from tests.support.server.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 1_000_000
BODY = json.dumps({"prompt": "abc"}).encode().ljust(SIZE)


@pytest.fixture
def narrow() -> Iterator[Server]:
    """A server with room for two bodies."""
    with serving(config=ServerConfig(max_body_bytes=SIZE, max_bodies_bytes=2 * SIZE)) as server:
        yield server
        until(server, (0, 0))


def gauges(server: Server) -> tuple[int, int]:
    """The bytes held, and how many bodies wait."""
    text = server.get("/metrics").body.decode()
    names = ("request_body_bytes", "request_bodies_waiting")
    found = [re.search(rf"^asyncllm_{name} (\S+)$", text, re.M) for name in names]
    held, waiting = (int(float(match[1])) for match in found if match)
    return held, waiting


def until(server: Server, wanted: tuple[int, int]) -> None:
    end = time.monotonic() + 5
    while gauges(server) != wanted:
        assert time.monotonic() < end, gauges(server)
        time.sleep(0.01)


class Sender:
    """A client that has sent only the beginning of its body."""

    def __init__(self, server: Server, *, chunked: bool = False):
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {SIZE}"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n"
        self.socket.sendall(head.encode())
        if not chunked:
            self.socket.sendall(BODY[:100])

    def finish(self) -> None:
        self.socket.sendall(BODY[100:])

    def answer(self) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        response.read()
        return response


def senders(stack: ExitStack, server: Server, count: int) -> list[Sender]:
    made = [Sender(server) for _ in range(count)]
    for sender in made:
        stack.enter_context(sender.socket)
    return made


def test_bodies_wait_their_turn(narrow: Server) -> None:
    with ExitStack() as stack:
        clients = senders(stack, narrow, 5)
        until(narrow, (2 * SIZE, 3))
        assert narrow.post("/v1/completions", {"prompt": "abc"}).status == 200, "small ones do not"
        for client in clients:
            client.finish()
        assert [client.answer().status for client in clients] == [200] * 5


def test_a_body_that_waits_too_long_is_refused(
    narrow: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "WAIT_SECONDS", 0.2)
    with ExitStack() as stack:
        clients = senders(stack, narrow, 3)
        refused = clients[2].answer()
        assert refused.status == 503
        assert refused.headers["Retry-After"] == "1"
        for client in clients[:2]:
            client.finish()
        assert [client.answer().status for client in clients[:2]] == [200] * 2


def test_a_client_that_leaves_makes_room(narrow: Server) -> None:
    with ExitStack() as stack:
        first, second, third = senders(stack, narrow, 3)
        until(narrow, (2 * SIZE, 1))
        first.socket.close()
        until(narrow, (2 * SIZE, 0))
        third.finish()
        assert third.answer().status == 200
        second.finish()
        assert second.answer().status == 200


def test_a_body_of_unknown_length_takes_the_limit(narrow: Server) -> None:
    with ExitStack() as stack:
        clients = [Sender(narrow, chunked=True) for _ in range(3)]
        for client in clients:
            stack.enter_context(client.socket)
        until(narrow, (2 * SIZE, 1))
        text = json.dumps({"prompt": "abc"}).encode()
        for client in clients:
            client.socket.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text))
        assert [client.answer().status for client in clients] == [200] * 3


def test_a_single_body_is_always_read() -> None:
    config = ServerConfig(max_body_bytes=SIZE, max_bodies_bytes=10)
    with serving(config=config) as server, ExitStack() as stack:
        [client] = senders(stack, server, 1)
        client.finish()
        assert client.answer().status == 200


def test_the_room_for_bodies_must_be_positive() -> None:
    with pytest.raises(BadRequest) as caught:
        ServerConfig(max_bodies_bytes=0)
    assert caught.value.param == "max_bodies_bytes"


def test_refused_bodies_are_not_kept(server: Server) -> None:
    """The garbage collector counts objects, not bytes: a cycle would keep them for long."""
    body = b'{"prompt":"' + b"\xc3\x28" * 500_000 + b'"}'
    too_long = json.dumps({"prompt": "word " * 200_000}).encode()

    gc.collect()
    gc.disable()
    try:
        for data in (body, too_long, b'{"unknown": [' + b"1," * 400_000 + b'1], "prompt": 1}'):
            assert server.post("/v1/completions", data).status == 400
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        large = [
            found
            for garbage in gc.garbage
            for found in gc.get_referents(garbage)
            if isinstance(found, bytes | bytearray | str) and len(found) > 500_000
        ]
        assert large == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
