"""The server over TLS: certificates, handshakes that fail or hang, clients that close."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import ssl
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.server.http import acceptor
from asyncllm.supervise.tls import Tls, load_context
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server.serving import Server

FILES = Path(__file__).parents[2] / "data" / "tls"


def pair(name: str) -> tuple[str, str]:
    return str(FILES / f"{name}.pem"), str(FILES / f"{name}.key")


def client_context(name: str = "first") -> ssl.SSLContext:
    """Trusts this certificate alone."""
    return ssl.create_default_context(cafile=FILES / f"{name}.pem")


def connect(server: Server, name: str = "first") -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    return client_context(name).wrap_socket(raw, server_hostname="localhost")


def get(server: Server, path: str, name: str = "first") -> int:
    context = client_context(name)
    with closing(
        http.client.HTTPSConnection("localhost", server.port, timeout=10, context=context)
    ) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def server(request: pytest.FixtureRequest, tls: Tls) -> Iterator[Server]:
    llm = FakeLLM(step_seconds=0.01)
    with serving(lambda: llm, new_loop=request.param, tls=tls) as running:
        yield running
        running.until_idle()


@pytest.fixture
def tls() -> Tls:
    return Tls(load_context(*pair("first")))


def test_requests_and_streams(server: Server) -> None:
    assert get(server, "/ready") == 200
    with connect(server) as client:
        body = json.dumps({"prompt": "abc", "max_tokens": 3, "stream": True}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        received = b""
        while b"[DONE]" not in received:
            more = client.recv(65536)
            assert more
            received += more
    assert received.startswith(b"HTTP/1.1 200")


def test_a_slow_handshake_holds_nobody_up_and_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 0.5)
    silent = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(20)]
    silent[0].sendall(b"\x16\x03\x01")  # how a handshake begins
    with socket.create_connection(("127.0.0.1", server.port), 10) as nonsense:
        nonsense.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert nonsense.recv(1000)[:1] in (b"", b"\x15"), "at most a TLS alert"
    assert get(server, "/health") == 200
    for client in silent:
        assert client.recv(1000) == b""
        client.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    for whole in (True, False):
        client = connect(server)
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True})
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        assert client.recv(100)
        if whole:
            client.close()
        else:
            client.shutdown(socket.SHUT_WR)  # under TLS, this ends both directions
        server.until_idle()
        client.close()


def test_a_new_certificate_is_for_new_connections(server: Server, tls: Tls) -> None:
    with connect(server) as old:
        tls.context = load_context(*pair("second"))
        with pytest.raises(ssl.SSLCertVerificationError):
            connect(server)
        assert get(server, "/ready", "second") == 200
        old.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert old.recv(100).startswith(b"HTTP/1.1 200")


def test_closing_does_not_wait_for_handshakes() -> None:
    with serving(tls=Tls(load_context(*pair("first")))) as running:
        client = socket.create_connection(("127.0.0.1", running.port), 10)
        assert get(running, "/ready") == 200
        begun = time.monotonic()
    assert time.monotonic() - begun < acceptor.HANDSHAKE_SECONDS / 2
    assert client.recv(10) == b""
    client.close()


@pytest.mark.parametrize(
    ("cert", "key", "param", "words"),
    [
        ("no/such.pem", "first.key", "tls_cert", "cannot read .*No such file"),
        ("first.pem", "no/such.key", "tls_key", "cannot read .*No such file"),
        ("first.pem", "", "tls_key", "cannot read .*Is a directory"),
        ("first.pem", "second.key", "tls_key", "is not the key of the certificate"),
        ("README.md", "first.key", "tls_key", "must hold a certificate and its key, in PEM"),
        ("first.key", "first.pem", "tls_key", "must hold a certificate and its key, in PEM"),
    ],
)
def test_files_that_do_not_do(cert: str, key: str, param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        load_context(str(FILES / cert), str(FILES / key))
    assert caught.value.param == param


@pytest.mark.parametrize(("name", "words"), [("first", ""), ("expired", "has expired")])
def test_an_old_certificate_is_warned_of(
    name: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    load_context(*pair(name))
    assert words in caplog.text
    assert bool(caplog.text) == bool(words)


def test_a_certificate_needs_a_key() -> None:
    with pytest.raises(BadRequest, match="need each other"):
        ServerConfig(tls_cert="a")
    with pytest.raises(BadRequest, match="need each other"):
        ServerConfig(tls_key="a")
