"""``asyncllm serve --executor process`` as a user meets it, and when that process is stopped."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncllm.supervise.signals import DEAD
from tests.support.server.serving import ServerProcess
from tests.support.team.ranks import executors

STREAM = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}


class Running(ServerProcess):
    def send(self, path: str, body: Any = None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data)
        return connection

    def ask(self, path: str, body: Any = None) -> Any:
        with closing(self.send(path, body)) as connection:
            return json.load(connection.getresponse())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with (tmp_path / "log").open("w") as log:
        options = "--executor", "process", "--no-supervise", "--cpu-threads", "1"
        running = Running(*options, "--stall-seconds", "20", log=log)
        yield running
        running.process.kill()
        running.stop()


def test_health_and_a_process_that_is_stopped(server: Running, tmp_path: Path) -> None:
    [rank_zero] = executors(server.process.pid)
    found = server.ask("/health")
    assert found["status"] == "idle"
    given_up = time.monotonic() + 10
    while found["operation"] == "loading" and time.monotonic() < given_up:
        time.sleep(0.05)  # it says that it has loaded, and then begins to wait for plans
        found = server.ask("/health")
    assert found["operation"] == "idle"
    choice = server.ask("/v1/completions", {"prompt": "1, 2, 3,", "max_tokens": 4})["choices"][0]
    assert choice["text"].startswith(" 4,")
    with closing(server.send("/v1/completions", STREAM)) as client:
        answer = client.getresponse()
        assert answer.readline().startswith(b"data: ")
        found = server.ask("/health")
        assert (found["status"], found["running"]) == ("ok", 1)
        assert found["operation"] in ("launch", "wait", "collect", "next plan", "idle")
        assert 0 <= found["operation_age"] < 10
        rank_zero.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        *_, error, done, _ = answer.read().decode().split("\n\n")
        assert time.monotonic() - started < 15.0  # a second, on a machine that is not busy
        said = json.loads(error.strip().removeprefix("data: "))["error"]
        assert said["code"] == "engine_dead"
        how = f"rank 0 (process {rank_zero.pid}) has been stopped for 0.5 s"
        assert said["message"].startswith(how)
        assert done == "data: [DONE]"
    assert server.process.wait(20) == DEAD
    rank_zero.wait(10)
    assert f"the engine died: {how}" in (tmp_path / "log").read_text()


def test_a_server_that_drains_lets_its_process_finish(server: Running, tmp_path: Path) -> None:
    [rank_zero] = executors(server.process.pid)
    body = {**STREAM, "max_tokens": 60}
    with closing(server.send("/v1/completions", body)) as client:
        answer = client.getresponse()
        assert answer.readline().startswith(b"data: ")
        server.process.terminate()
        assert b'"finish_reason":"length"' in answer.read()
    assert server.process.wait(30) == 0
    rank_zero.wait(10)
    assert "ERROR" not in (tmp_path / "log").read_text()
