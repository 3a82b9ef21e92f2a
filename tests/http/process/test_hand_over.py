"""Requests whose engine dies: those without an answer yet are served by the next server."""

from __future__ import annotations

import http.client
import json
from typing import Any

from asyncllm.supervise.signals import DEAD
from tests.http.process.test_supervise import Supervised, supervised

#: Takes two seconds: longer than the first engine lives.
SLOW = {"prompt": "ab" * 50, "max_tokens": 100, "ignore_eos": True}


def send(running: Supervised, body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=40)
    connection.request("POST", "/generate", json.dumps(body))
    return connection


def test_unanswered_requests_are_served_and_streams_end() -> None:
    with supervised(step_seconds=0.02, max_running=2, first_life=1.0) as running:
        running.until_ready()
        running_one, waiting, also_waiting = (send(running, SLOW) for _ in range(3))
        stream = send(running, {**SLOW, "prompt": "a", "stream": True})
        huge = send(running, {**SLOW, "user": "x" * 2**20})
        *_, error, done, rest = stream.getresponse().read().decode().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert (done, rest) == ("data: [DONE]", "")
        # What is too large to be kept gets an answer that tells its client to try again.
        refusal = huge.getresponse()
        assert (refusal.status, refusal.headers["x-should-retry"]) == (503, "true")
        running.until_ready()
        for connection in (running_one, waiting, also_waiting):
            answer = connection.getresponse()
            assert answer.status == 200
            assert json.load(answer)["text"] == SLOW["prompt"]
            connection.request("GET", "/ready")  # the connection is as any other
            assert connection.getresponse().read()
        for connection in (running_one, waiting, also_waiting, stream, huge):
            connection.close()
        running.process.terminate()
        assert running.end() == 0


def test_a_request_is_not_passed_on_twice() -> None:
    """It may be what kills the engine."""
    with supervised(step_seconds=0.02, life_seconds=0.7) as running:
        running.until_ready()
        connection = send(running, SLOW)
        running.until_ready()
        answer = connection.getresponse()
        assert answer.status == 503
        assert json.load(answer)["error"]["code"] == "engine_dead"
        connection.close()
        running.process.terminate()
        assert running.end() in (0, DEAD), "its engine may die just now"


def test_a_client_that_has_left_meanwhile_costs_nothing() -> None:
    with supervised(step_seconds=0.02, first_life=0.7) as running:
        running.until_ready()
        send(running, SLOW).close()
        gone = send(running, SLOW)
        gone.close()
        running.until_ready()
        status, _, body = running.ask("POST", "/generate", {"prompt": "a", "max_tokens": 2})
        assert (status, json.loads(body)["text"]) == (200, "a")
        running.process.terminate()
        assert running.end() == 0
        assert "Traceback" not in "".join(running.log)
