"""Very many clients at once: the server stays in touch with all of them."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest

from asyncllm.server.http import turnstile
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import PATIENCE, Server, serving

COUNT = 300
BODY = json.dumps({"prompt": "abc" * 50, "stream": True}).encode()
REQUEST = (
    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
    + BODY
)
LOAD = b"GET /load HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def new_llm() -> FakeLLM:
    llm = FakeLLM()
    llm.limits = msgspec.structs.replace(llm.limits, max_waiting=COUNT)
    llm.hold()
    return llm


def gauge(server: Server, name: str) -> float:
    found = re.search(rf"^asyncllm_{name} (\S+)$", server.get("/metrics").body.decode(), re.M)
    assert found is not None
    return float(found[1])


def test_the_last_arrival_is_not_answered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else more begin in a turn in which other programs have slowed down everything else.
    monkeypatch.setattr(turnstile, "MOST_SECONDS", turnstile.LEAST_SECONDS)
    free = threading.Event()
    with serving(new_llm) as server, ExitStack() as stack, ThreadPoolExecutor() as threads:
        waited = gauge(server, "accept_wait_max_seconds")
        stack.callback(free.set)
        threads.submit(server.call, free.wait)
        clients = []
        for request in [REQUEST] * COUNT + [LOAD]:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.settimeout(PATIENCE)
            client.sendall(request)
            clients.append(client)
        time.sleep(waited + 0.5)
        free.set()  # all of them come in one turn of the loop
        with clients[-1].makefile("rb") as answer:
            load = json.loads(answer.read().partition(b"\r\n\r\n")[2])["server_load"]
        assert load < COUNT * 2 // 3, "most of them had not begun yet"
        server.until(lambda: len(server.llm.params) == COUNT, PATIENCE)
        # They had waited while the loop was busy, which no timer of the loop could see.
        assert gauge(server, "accept_wait_max_seconds") > waited + 0.3
        assert gauge(server, "start_wait_max_seconds") > 0.005
        server.call(server.llm.resume)
        server.until_idle()
