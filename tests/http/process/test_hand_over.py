"""Requests whose engine dies: those without an answer yet are served by the next server."""

from __future__ import annotations

import http.client
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.http.process.test_supervise import Supervised, supervised, until
from tests.support.server.live import until_live

if TYPE_CHECKING:
    from pathlib import Path

#: With steps of SLOW_STEP seconds it takes 20 s, longer than any of these engines lives.
LONG = {"prompt": "ab" * 50, "max_tokens": 100, "ignore_eos": True}
SLOW_STEP = 0.2


def send(running: Supervised, body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=40)
    connection.request("POST", "/generate", json.dumps(body))
    return connection


def kill_engine(running: Supervised) -> None:
    os.kill(running.server, signal.SIGUSR1)


def test_unanswered_requests_are_served_and_streams_end() -> None:
    with supervised(max_running=2, first={"step_seconds": SLOW_STEP}) as running:
        running.until_ready()
        running_one, waiting, also_waiting = (send(running, LONG) for _ in range(3))
        stream = send(running, {**LONG, "prompt": "a", "stream": True})
        huge = send(running, {**LONG, "user": "x" * 2**20})
        begun = stream.getresponse()
        until_live(running.port, running=2, waiting=3)
        kill_engine(running)
        *_, error, done, rest = begun.read().decode().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert (done, rest) == ("data: [DONE]", "")
        # What is too large to be kept gets an answer that tells its client to try again.
        refusal = huge.getresponse()
        assert (refusal.status, refusal.headers["x-should-retry"]) == (503, "true")
        running.until_ready()
        for connection in (running_one, waiting, also_waiting):
            answer = connection.getresponse()
            assert answer.status == 200
            assert json.load(answer)["text"] == LONG["prompt"]
            connection.request("GET", "/ready")  # the connection is as any other
            assert connection.getresponse().read()
        for connection in (running_one, waiting, also_waiting, stream, huge):
            connection.close()
        running.process.terminate()
        assert running.end() == 0


def test_a_request_is_not_passed_on_twice() -> None:
    """It may be what kills the engine."""
    with supervised(step_seconds=SLOW_STEP) as running:
        running.until_ready()
        connection = send(running, LONG)
        for _ in range(2):
            until_live(running.port, running=1)
            kill_engine(running)
            running.until_ready()
        answer = connection.getresponse()
        assert answer.status == 503
        assert json.load(answer)["error"]["code"] == "engine_dead"
        connection.close()
        running.process.terminate()
        assert running.end() == 0


def test_a_request_that_no_server_will_take_is_told_so(tmp_path: Path) -> None:
    with supervised(restart_when=str(tmp_path / "never"), step_seconds=SLOW_STEP) as running:
        running.until_ready()
        connection = send(running, LONG)
        until_live(running.port, running=1)
        kill_engine(running)
        until(lambda: "starting it again" in "".join(running.log))
        running.process.terminate()
        answer = connection.getresponse()
        assert (answer.status, answer.headers["x-should-retry"]) == (503, "true")
        connection.close()
        assert running.end() == 0


@pytest.mark.parametrize("before_the_end", [True, False])
def test_a_client_that_leaves_costs_nothing(before_the_end: bool) -> None:
    with supervised(first={"step_seconds": SLOW_STEP}) as running:
        running.until_ready()
        gone = send(running, LONG)
        until_live(running.port, running=1)
        if before_the_end:
            gone.close()
        kill_engine(running)
        gone.close()
        running.until_ready()
        status, _, body = running.ask("POST", "/generate", {"prompt": "a", "max_tokens": 2})
        assert (status, json.loads(body)["text"]) == (200, "a")
        running.process.terminate()
        assert running.end() == 0
        assert "Traceback" not in "".join(running.log)
