"""Very many clients at once: the server stays in touch with all of them."""

from __future__ import annotations

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec

from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server, serving

COUNT = 300
BODY = json.dumps({"prompt": "abc" * 50, "stream": True}).encode()
REQUEST = (
    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
    + BODY
)


def new_llm() -> FakeLLM:
    llm = FakeLLM()
    llm.limits = msgspec.structs.replace(llm.limits, max_waiting=COUNT)
    llm.hold()
    return llm


def gauge(server: Server, name: str) -> float:
    found = re.search(rf"^asyncllm_{name} (\S+)$", server.get("/metrics").body.decode(), re.M)
    assert found is not None
    return float(found[1])


def test_the_last_arrival_is_not_answered_last() -> None:
    with serving(new_llm) as server, ExitStack() as stack, ThreadPoolExecutor() as threads:
        assert gauge(server, "accept_wait_max_seconds") < 0.2
        busy = threads.submit(server.call, lambda: time.sleep(1.0))
        for _ in range(COUNT):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(REQUEST)
        assert not busy.done(), "all of them came in one turn of the loop"
        load = server.get("/load").json["server_load"]
        assert load < COUNT * 2 // 3, "most of them had not begun yet"
        server.until(lambda: len(server.llm.params) == COUNT)
        # They had waited while the loop was busy, which no timer of the loop could see.
        assert gauge(server, "accept_wait_max_seconds") > 0.3
        assert gauge(server, "start_wait_max_seconds") > 0.005
        server.call(server.llm.resume)
        server.until_idle()
