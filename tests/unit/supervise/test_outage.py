"""Answers while no server runs, to clients that need not behave."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from asyncllm.supervise import outage as module
from asyncllm.supervise.listening import bind
from asyncllm.supervise.outage import Outage
from asyncllm.supervise.poller import Poller
from tests.support.server.files import only

if TYPE_CHECKING:
    from collections.abc import Iterator


class CountingPoller(Poller):
    turns = 0

    def wait(self, seconds: float | None) -> None:
        self.turns += 1
        super().wait(seconds)


@pytest.fixture
def poller() -> CountingPoller:
    return CountingPoller()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, poller: CountingPoller) -> Iterator[int]:
    """Of an outage that runs in a thread; it must hold no connection in the end."""
    monkeypatch.setattr(module, "CLIENT_SECONDS", 0.5)
    monkeypatch.setattr(module, "CROWDED_SECONDS", 0.3)
    monkeypatch.setattr(module, "MOST_CLIENTS", 4)
    sockets = bind("127.0.0.1", 0)
    outage = Outage(poller, sockets, lambda: 3.2)
    outage.open()
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set() or outage.deadline is not None:
            poller.wait(0.05)
            outage.expire()

    thread = threading.Thread(target=run)
    thread.start()
    yield sockets[0].getsockname()[1]
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    sockets[0].close()


def status(port: int, method: str = "GET", body: bytes | None = None) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request(method, "/v1/completions", body)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.headers["Retry-After"] == "4"
        assert (method == "HEAD") == (text == b"")
        if text:
            assert json.loads(text)["error"]["code"] == "not_ready"
        return answer.status


def test_every_request_gets_503(port: int) -> None:
    large = b"x" * 2_000_000  # its sender sees the answer, not a reset
    for method, body in (("GET", None), ("HEAD", None), ("POST", b"{}"), ("POST", large)):
        assert status(port, method, body) == 503


def test_silent_clients_are_closed_and_take_nothing_from_others(port: int) -> None:
    address = ("127.0.0.1", port)
    # More than are served at once: the next one waits until they are closed.
    silent = [socket.create_connection(address, timeout=20) for _ in range(6)]
    silent[0].sendall(b"GET / HT")
    with socket.create_connection(address) as gone:
        gone.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n")
    assert status(port) == 503
    for client in silent:
        assert client.recv(1) == b""
        client.close()


def test_without_files_it_waits_instead_of_spinning(port: int, poller: CountingPoller) -> None:
    client = socket.socket()
    with client, only(0):
        client.settimeout(20)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        turns, until = poller.turns, time.monotonic() + 0.5
        while time.monotonic() < until:
            time.sleep(0.01)
        assert poller.turns - turns < 40
    assert status(port) == 503


def test_connections_leave_no_files_open(port: int) -> None:
    assert status(port) == 503
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert status(port) == 503
    assert len(os.listdir("/proc/self/fd")) <= before + 4
