"""The server process: start-up, signals, draining, exit codes."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.supervise.signals import DEAD, SAME_SECONDS
from tests.support.server.live import until_live
from tests.support.server.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds for a process to start, to answer or to end, on a machine that is very busy.
PATIENCE = 40.0

ENDLESS = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@contextmanager
def process(
    port: int = 0, drain_seconds: float = 5.0, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error", "-m", "tests.support.server.serve_fake"]
    with subprocess.Popen(
        [*command, str(port), str(drain_seconds), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def ready_port(running: subprocess.Popen[str]) -> int:
    assert running.stdout is not None
    line = running.stdout.readline()
    pattern = (
        r"asyncllm is ready on http://127.0.0.1:(\d+) "
        r"\(model fake, cpu, float32, context 4096, KV cache 1024 tokens\)\n"
    )
    match = re.fullmatch(pattern, line)
    assert match, line
    return int(match[1])


class Client:
    """Each request on a connection of its own, which stays open until the end of the test."""

    def __init__(self) -> None:
        self._connections: list[http.client.HTTPConnection] = []

    def begin(
        self, port: int, method: str, path: str, body: Any = None
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self._connections.append(connection)
        connection.request(method, path, None if body is None else json.dumps(body))
        return connection

    def send(self, port: int, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        return self.begin(port, method, path, body).getresponse()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


@pytest.fixture
def client() -> Iterator[Client]:
    with closing(Client()) as client:
        yield client


def end(running: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what was written to stderr."""
    _, errors = running.communicate(timeout=PATIENCE)
    return running.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_at_a_signal(client: Client, number: signal.Signals) -> None:
    with process() as running:
        port = ready_port(running)
        assert client.send(port, "GET", "/ready").status == 200
        running.send_signal(number)
        assert end(running) == (0, "")


def test_port_taken() -> None:
    """It shows before anything is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(port, load_seconds=60) as running:
            code, errors = end(running)
    assert code == 1
    assert f"cannot listen on http://127.0.0.1:{port}" in errors
    assert "already in use" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("kind", "traceback"), [("expected", False), ("bug", True)])
def test_model_does_not_load(kind: str, traceback: bool) -> None:
    with process(load_error=kind) as running:
        code, errors = end(running)
    assert code == 1
    assert errors.startswith("cannot load the model: ")
    assert ("Traceback" in errors) == traceback


def test_while_loading(client: Client) -> None:
    port = free_port()
    with process(port, load_seconds=60) as running:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                assert client.send(port, "GET", "/health").status == 200
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert client.send(port, "GET", "/ready").status == 503
        answer = client.send(port, "POST", "/generate", ENDLESS)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert json.load(answer)["error"]["code"] == "not_ready"
        running.terminate()
        assert end(running) == (0, "")


def test_drains(client: Client) -> None:
    """Running streams finish; new requests are refused, on old and new connections."""
    with process(step_seconds=0.04) as running:
        port = ready_port(running)
        stream = client.send(port, "POST", "/generate", {**ENDLESS, "max_tokens": 50})
        whole = client.begin(port, "POST", "/generate", {"prompt": "ab" * 20, "max_tokens": 40})
        until_live(port, running=2)
        running.terminate()
        while client.send(port, "GET", "/ready").status == 200:
            pass
        assert client.send(port, "GET", "/ready").status == 503
        assert client.send(port, "GET", "/health").status == 200
        assert client.send(port, "POST", "/generate", ENDLESS).status == 503
        text = stream.read().decode()
        assert text.count('"text":"a"') == 50
        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert json.load(whole.getresponse())["text"] == "ab" * 20
        code, errors = end(running)
        assert code == 0
        assert "Traceback" not in errors


@pytest.mark.parametrize("second_signal", [False, True])
def test_requests_that_take_too_long_are_cut_off(client: Client, second_signal: bool) -> None:
    with process(drain_seconds=60 if second_signal else 0.3, step_seconds=0.02) as running:
        port = ready_port(running)
        stream = client.send(port, "POST", "/generate", ENDLESS)
        whole = client.begin(port, "POST", "/generate", {**ENDLESS, "stream": False})
        until_live(port, running=2)
        begun = time.monotonic()
        running.terminate()
        if second_signal:
            time.sleep(SAME_SECONDS + 0.1)  # sooner it would count as the first one again
            running.terminate()
        *_, error, done, rest = stream.read().decode().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "not_ready"
        assert (done, rest) == ("data: [DONE]", "")
        assert whole.getresponse().status == 503
        code, errors = end(running)
        assert time.monotonic() - begun < 30, "the drain time of 60 s was waited for"
        assert code == 0
        assert "cutting 2 requests off" in errors
        assert "Traceback" not in errors


def test_nonsense_leaves_no_trace_in_the_log() -> None:
    """Anybody may send it; a log that they can fill is of no use."""
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
    nonsense = [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        head + b"Expect: nothing\r\n\r\n",
        head + b"A: " + b"b" * 10_000 + b"\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        head + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        head + b"Content-Length: 2\r\n\r\n{]",
        head + b"Content-Length: 2\r\n\r\n",
    ]
    with process() as running:
        port = ready_port(running)
        for data in nonsense:
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
                client.sendall(data)
                if data is not nonsense[-1]:
                    assert client.recv(100).startswith(b"HTTP/1.")
        running.terminate()
        assert end(running) == (0, "")


def test_a_dead_engine_ends_the_process() -> None:
    with process(life_seconds=0.3) as running:
        ready_port(running)
        assert running.wait(PATIENCE) == DEAD
        assert running.stderr is not None
        assert "the engine died: planted death" in running.stderr.read()
