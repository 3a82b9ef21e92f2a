"""Streams on real sockets: framing, disconnections, slow readers, old clients, mounted apps."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import time
from typing import TYPE_CHECKING

import pytest
import uvloop

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import StepError
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Answer, Server, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG = {"prompt": "a" * 10, "max_tokens": 4000, "ignore_eos": True}


class SlowLLM(FakeLLM):
    """So slow that a client can go away before a LONG answer is there."""

    def __init__(self) -> None:
        super().__init__(step_seconds=0.0005)


@pytest.fixture(
    scope="module",
    params=[
        ("", True, uvloop.new_event_loop),
        ("", True, asyncio.new_event_loop),
        ("/llm", False, uvloop.new_event_loop),
        ("/llm", False, asyncio.new_event_loop),
    ],
    ids=["uvloop", "asyncio", "mounted-uvloop", "mounted-asyncio"],
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Served as by run.py, and mounted in an application whose runner cancels no handlers."""
    prefix, handler_cancellation, new_loop = request.param
    with serving(
        SlowLLM, prefix=prefix, handler_cancellation=handler_cancellation, new_loop=new_loop
    ) as running:
        yield running
        running.until_idle()


def read_answer(client: socket.socket) -> Answer:
    response = http.client.HTTPResponse(client)
    response.begin()
    return Answer(response.status, response.headers, response.read())


def test_utf8_is_never_split(server: Server) -> None:
    text = 'aé🙂漢\u2028"\\\n\x00'
    answer = server.post("/generate", {"prompt": text, "stream": True})
    *frames, last = answer.frames
    assert [frame["text"] for frame in frames] == list(text)
    assert last["usage"]["completion_tokens"] == len(text.encode()) + 1


def test_one_write_per_step(server: Server) -> None:
    """The frames of all choices of a request leave in one chunk."""
    body = {"messages": [{"role": "user", "content": "x"}], "n": 3, "stream": True}
    with server.open("/v1/chat/completions", body) as client:
        raw = b""
        while not raw.endswith(b"\r\n0\r\n\r\n"):
            raw += client.recv(65536)
    chunks = []
    rest = raw.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    opening, *steps, end = chunks
    assert end == b""
    for chunk in [opening, *steps[:-1]]:
        frames = [json.loads(line[6:]) for line in chunk.decode().split("\n\n")[:-1]]
        assert [frame["choices"][0]["index"] for frame in frames] == [0, 1, 2]
    assert steps[-1].count(b'"finish_reason":"stop"') == 3
    assert steps[-1].endswith(b"data: [DONE]\n\n")


def test_keep_alive_after_a_stream(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    sockets = set()
    for stream in (True, True, False, True):
        body = json.dumps({"prompt": "abc", "stream": stream})
        connection.request("POST", server.prefix + "/generate", body)
        sockets.add(connection.sock)
        assert b"usage" in connection.getresponse().read()
    assert len(sockets) == 1
    connection.close()


@pytest.mark.parametrize("extra", ["", "Connection: keep-alive\r\n"])
def test_http_1_0(server: Server, extra: str) -> None:
    """No chunks, and the end of the connection is the end of the stream."""
    body = {"prompt": "abc", "stream": True}
    with server.open("/generate", body, version="1.0", extra=extra) as client:
        raw = b""
        while data := client.recv(65536):
            raw += data
    head, _, text = raw.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    frames = text.decode().split("\n\n")
    assert [json.loads(frame[6:])["text"] for frame in frames[:-2]] == ["a", "b", "c", ""]
    assert frames[-2:] == ["data: [DONE]", ""]


def test_failure_in_mid_stream(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2}
    server.call(server.llm.hold)
    with server.open("/v1/chat/completions", body) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(server.llm, "fail", StepError("it broke", code="broken"))
        server.call(server.llm.resume)
        raw = b""
        while not raw.endswith(b"\r\n0\r\n\r\n"):
            raw += client.recv(65536)
    *_, error, done = raw.decode().split("data: ")
    expected = {"message": "it broke", "type": "server_error", "param": None, "code": "broken"}
    assert json.loads(error) == {"error": expected}
    assert done.startswith("[DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("reset", [False, True])
def test_disconnected_while_running(server: Server, stream: bool, n: int, reset: bool) -> None:
    aborted = len(server.llm.aborted)
    body = {**LONG, "prompt": "a", "n": n, "stream": stream}
    client = server.open("/v1/completions", body)
    server.until(lambda: server.llm.stats.running == n)
    if stream:
        client.recv(1000)
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    server.until(lambda: server.llm.stats.pages_held == 0)
    assert len(server.llm.aborted) == aborted + n


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_while_queued(server: Server, stream: bool) -> None:
    server.call(server.llm.hold)
    clients = [server.open("/generate", {**LONG, "stream": stream}) for _ in range(3)]
    server.until(lambda: server.llm.stats.waiting == 3)
    for client in clients:
        client.close()
    # No step runs: nothing but the connection itself tells.
    server.until(lambda: server.llm.stats.waiting == 0)
    server.call(server.llm.resume)


def test_disconnection_costs_one_step(server: Server) -> None:
    """The step that finds the client gone is the last one."""
    with server.open("/generate", {**LONG, "stream": True}) as client:
        client.recv(1000)
        server.call(server.llm.hold)
        time.sleep(0.05)
    time.sleep(0.2)
    steps = server.call(lambda: server.llm.stats.steps)
    server.call(server.llm.resume)
    server.until_idle()
    assert server.call(lambda: server.llm.stats.steps) <= steps + 1


def test_many_streams_at_once(server: Server) -> None:
    clients = [server.open("/generate", {"prompt": "é" * 50, "stream": True}) for _ in range(16)]
    for client in clients:
        assert "".join(frame["text"] for frame in read_answer(client).frames) == "é" * 50
        client.close()


def test_aborts_are_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="asyncllm.server"):
        client = server.open("/generate", {**LONG, "stream": True}, extra="X-Request-Id: abc\r\n")
        client.recv(1000)
        client.close()
        server.until_idle()
        server.until(lambda: "request abc aborted" in caplog.text)


@pytest.mark.parametrize("others", [0, 1])
def test_a_load_that_is_stopped_is_one_line_in_the_log(
    server: Server, others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At once if nothing else is served, else within a second."""
    server.call(server.llm.hold)
    stay = [server.open("/generate", {**LONG, "stream": True}) for _ in range(others)]
    clients = [server.open("/generate", LONG) for _ in range(12)]
    stats = server.llm.stats
    server.until(lambda: stats.waiting + stats.running == 12 + others)
    with caplog.at_level(logging.INFO, logger="asyncllm.server"):
        for client in clients:
            client.close()
        server.until(lambda: "12 requests aborted: c" in caplog.text)
    assert len(caplog.records) == 1
    for client in stay:
        client.close()
    server.call(server.llm.resume)
    server.until_idle()


@pytest.mark.parametrize(("path", "advice"), [("/nothing", ""), ("/generate", "; allowed: POST")])
def test_errors_inside_a_mounted_app(server: Server, path: str, advice: str) -> None:
    answer = server.get(path)
    assert answer.json["error"]["message"].endswith(f": GET {server.prefix}{path}{advice}")
    assert answer.headers["X-Request-Id"]


def test_gauge_of_live_requests(server: Server) -> None:
    server.call(server.llm.hold)
    client = server.open("/generate", LONG)
    server.until(lambda: server.llm.stats.waiting == 1)
    assert b"asyncllm_http_requests_live 1.0" in server.get("/metrics").body
    client.close()
    server.call(server.llm.resume)
    server.until_idle()
    wait_for(lambda: b"asyncllm_http_requests_live 0.0" in server.get("/metrics").body)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 3
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_client_that_never_reads() -> None:
    """Its text is merged into few frames while it does not read, and none is lost."""
    wide_frames = ServerConfig(served_model_name=("m" * 2000,))  # more than the kernel's buffers
    with (
        serving(config=wide_frames) as server,
        server.open("/v1/completions", {**LONG, "stream": True}) as client,
    ):
        server.until(lambda: len(server.llm.params) == 1)
        server.until_idle()
        frames = read_answer(client).frames
    assert len(frames) < 3500
    assert "".join(frame["choices"][0]["text"] for frame in frames) == "a" * 4000
