"""Whole answers that are long, and clients that are slow to read them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.server import connection

if TYPE_CHECKING:
    import socket

    from tests.http.serving import Server

SECONDS = 1.0
#: Answered with more bytes than the kernel takes off our hands.
LONG: dict[str, Any] = {
    "prompt": "a",
    "max_tokens": 4000,
    "ignore_eos": True,
    "logprobs": 20,
    "n": 4,
}


@pytest.fixture
def impatient(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(connection, "GIVE_UP_SECONDS", SECONDS)
    monkeypatch.setattr(connection, "WATCH_SECONDS", 0.05)
    return server


def ask(server: Server) -> socket.socket:
    """Have the long answer made, and read its first byte."""
    client = server.open("/v1/completions", LONG, extra="Connection: close\r\n")
    assert client.recv(1) == b"H"
    return client


def read_on(client: socket.socket) -> bytes:
    """All that is still to come, whether or not it is the end."""
    parts = []
    try:
        while part := client.recv(1 << 20):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_who_does_not_read_is_cut_off(impatient: Server) -> None:
    with ask(impatient) as client:
        # The engine is done with it, and so is all that a request holds.
        impatient.until_idle()
        assert impatient.get("/load").json == {"server_load": 0}
        assert impatient.post("/v1/completions", {"prompt": "b"}).status == 200
        time.sleep(2 * SECONDS)
        rest = read_on(client)
    head, _, body = rest.partition(b"\r\n\r\n")
    [length] = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")]
    assert len(body) < int(length.split()[1])


def test_who_reads_slowly_gets_all(impatient: Server) -> None:
    with ask(impatient) as client:
        began, parts = time.monotonic(), []
        while time.monotonic() < began + 3 * SECONDS:
            parts.append(client.recv(1 << 17))
            time.sleep(SECONDS / 20)
        parts.append(read_on(client))
    _, _, body = b"".join(parts).partition(b"\r\n\r\n")
    assert len(json.loads(body)["choices"]) == 4
