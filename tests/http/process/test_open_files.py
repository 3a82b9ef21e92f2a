"""A server with few open files: probes are answered, and nobody is cut off in silence."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.http.process.test_supervise import Supervised, children, own_session, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")

FILES = 64
CLIENTS = 250
SLOW = {"prompt": "a", "max_tokens": 800, "ignore_eos": True}


@contextmanager
def serving(ulimit: str, options: str = "") -> Iterator[Supervised]:
    """A server without a model, that its shell has given this limit."""
    serve = f"{sys.executable} -m asyncllm serve --device sim --port 0 --max-num-seqs 16 {options}"
    shell = ("bash", "-c", f"ulimit {ulimit} && exec {serve}")
    with own_session(*shell, stdout=-1, stderr=-1, text=True) as process:
        running = Supervised(process)
        running.until_ready()
        yield running
        process.terminate()
        assert running.end() == 0


def metric(running: Supervised, name: str) -> float:
    text = running.ask("GET", "/metrics")[2].decode()
    found = re.search(rf"^asyncllm_{re.escape(name)} (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connect(port: int, stack: ExitStack) -> list[socket.socket]:
    address = ("127.0.0.1", port)
    return [stack.enter_context(socket.create_connection(address, 20)) for _ in range(CLIENTS)]


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        said = client.recv(10)
    except BlockingIOError:
        return False
    assert said == b""
    return True


def complete(port: int) -> str:
    """How a request ends that takes a while."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        client.request("POST", "/v1/completions", json.dumps(SLOW))
        answer = client.getresponse()
        found = json.load(answer)
        if answer.status == 200:
            return str(found["choices"][0]["finish_reason"])
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        return str(found["error"]["code"])


def test_many_clients_and_few_files() -> None:
    with serving(f"-n {FILES}") as running, ExitStack() as stack:
        idle = connect(running.port, stack)
        for _ in range(5):
            assert running.status("/health") == 200
        assert complete(running.port) == "length"
        assert metric(running, "open_files_limit") == FILES
        assert metric(running, "connections_open") < FILES
        closed = sum(map(is_closed, idle))
        assert 0 < CLIENTS - closed < FILES
        assert closed <= metric(running, 'connections_crowded_total{outcome="closed"}')

        with ThreadPoolExecutor(CLIENTS) as threads:
            ends = [threads.submit(complete, running.port) for _ in range(CLIENTS)]
            until(lambda: any(end.done() for end in ends))
            assert running.status("/health") == 200
            count = Counter(end.result() for end in ends)
        assert count.keys() == {"length", "too_many_connections"}
        assert sum(count.values()) == CLIENTS

        connect(running.port, stack)
        server = running.server
        os.kill(server, signal.SIGKILL)
        until(lambda: running.status("/health") == 200)
        assert children(running.process.pid) != [server]
        before = [cpu_seconds(pid) for pid in (running.process.pid, running.server)]
        time.sleep(0.5)
        after = [cpu_seconds(pid) for pid in (running.process.pid, running.server)]
        assert sum(after) - sum(before) < 0.25, "nothing spins"
    log = "".join(running.log)
    assert f"at most {FILES} open files (ulimit -n), of which up to 48 may be connections" in log
    assert f"with a limit of {FILES} open files (ulimit -n): idle ones are closed" in log


def test_many_clients_of_a_front_with_few_files() -> None:
    with serving(f"-n {FILES}", "--dp 2") as running, ExitStack() as stack:
        idle = connect(running.port, stack)
        for _ in range(5):
            assert running.status("/health") == 200
        assert metric(running, "front_open_files_limit") == FILES
        assert 0 < metric(running, "front_connections_open") < FILES
        assert complete(running.port) == "length"
        closed = sum(map(is_closed, idle))
        assert 0 < CLIENTS - closed < FILES
        with ThreadPoolExecutor(CLIENTS) as threads:
            ends = [threads.submit(complete, running.port) for _ in range(CLIENTS)]
            until(lambda: any(end.done() for end in ends))
            for path in ("/health", "/ready", "/load", "/metrics"):
                assert running.status(path) == 200
            count = Counter(end.result() for end in ends)
        assert count.keys() == {"length", "too_many_connections"}
        assert sum(count.values()) == CLIENTS
    log = "".join(running.log)
    assert f"with a limit of {FILES} open files (ulimit -n): idle ones are closed" in log


def test_the_soft_limit_is_raised() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with serving(f"-Sn {FILES}") as running:
        assert metric(running, "open_files_limit") == hard
