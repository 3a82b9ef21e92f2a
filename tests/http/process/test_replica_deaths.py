"""Replicas that die or hang: what clients get, whatever was done of their requests by then."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.http.process.test_replicas import SLOW, loads, metric, raw, send
from tests.http.process.test_supervise import STREAM, children, supervised, until
from tests.support.server.ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")


def test_a_replica_that_dies_loading_is_started_again_while_another_serves(tmp_path: Path) -> None:
    serves = tmp_path / "the other serves"

    def is_ready() -> bool:
        with suppress(ConnectionError):
            return running.status("/ready") == 200
        return False

    with supervised(free_port(), replicas=2, fails_when=str(serves)) as running:
        until(is_ready)
        serves.touch()
        running.until_ready()  # which both say together
        running.process.terminate()
        assert running.end() == 0
    assert "replica 1 has ended with status 1: starting it again now" in "".join(running.log)


def test_what_a_killed_replica_had_not_begun_moves() -> None:
    with supervised(replicas=2, step_seconds=0.03, max_running=8, max_waiting=50) as running:
        running.until_ready()
        victim, other = children(running.process.pid)
        longer = {**SLOW, "max_tokens": 90}
        waiting = [send(running, {**longer, "user": f"{i}"}) for i in range(10)]
        streams = [send(running, {**STREAM, "max_tokens": 90}) for _ in range(4)]
        huge = [send(running, {**longer, "user": "x" * 2**21}) for _ in range(2)]
        answers = [stream.getresponse() for stream in streams]
        until(lambda: loads(running) == [8, 8])
        os.kill(victim, signal.SIGKILL)
        texts = [answer.read() for answer in answers]
        for text in texts:
            assert text.endswith(b"data: [DONE]\n\n")
        assert sum(b'"code":"engine_dead"' in text for text in texts) == 2
        for connection in waiting:
            answer = connection.getresponse()
            assert answer.status == 200
            assert json.load(answer)["text"].startswith("abab")
            connection.request("GET", "/v1/models")  # the connection is as any other
            assert connection.getresponse().read()
        # What was too large to be kept gets an answer that tells its client to try again.
        ends = [connection.getresponse() for connection in huge]
        refused, answered = sorted(ends, key=lambda answer: -answer.status)
        assert (refused.status, answered.status) == (503, 200)
        assert b"the replica that was to answer has died" in refused.read()
        running_now = children(running.process.pid)
        assert other in running_now
        assert running.status("/health") == running.status("/ready") == 200
        until(lambda: metric(running, "asyncllm_replicas_ready") == {"": 2}, 40)
        assert metric(running, "asyncllm_requests_moved_total") == {"": 5}
        for connection in (*waiting, *streams, *huge):
            connection.close()
        running.process.terminate()
        assert running.end() == 0
    assert "replica 0 has ended by SIGKILL" in "".join(running.log)


def test_a_last_answer_that_is_whole_is_not_followed_by_another() -> None:
    """Its replica dies before it can say that the connection is closed."""
    with supervised(replicas=2, first={"dies_after": "kept"}) as running:
        running.until_ready()
        body = b'{"prompt":"ab","max_tokens":2}'
        head = b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        answer = raw(running, head + body)
        assert answer.startswith(b"HTTP/1.0 200 ")
        assert answer.count(b"HTTP/1.") == 1
        running.process.terminate()
        assert running.end() == 0


@pytest.mark.parametrize("dies_after", ["received", "begun"])
def test_no_client_is_left_without_an_answer_of_which_nothing_was_sent(dies_after: str) -> None:
    """Replicas die when they have read a request, or when the head of its answer is ready."""
    with supervised(replicas=2, first={"dies_after": dies_after}) as running:
        running.until_ready()
        streams = [True, False] if dies_after == "begun" else [True]  # one moves, and kills both
        for stream in streams:
            with closing(send(running, {"prompt": "a", "stream": stream})) as connection:
                answer = connection.getresponse()
                assert (answer.status, answer.headers["Content-Type"]) == (503, "application/json")
                assert json.load(answer)["error"]["code"] == "not_ready"
        until(lambda: metric(running, "asyncllm_replica_deaths_total") == {"": 2})
        until(lambda: running.status("/ready") == 200)
        assert running.ask("POST", "/generate", {"prompt": "a", "max_tokens": 2})[0] == 200
        running.process.terminate()
        assert running.end() == 0


def test_a_dead_engine_a_stopped_replica_and_a_killed_front() -> None:
    """Requests wait for nobody that does not react."""
    with supervised(replicas=2, step_seconds=0.02, first={"life_seconds": 1.5}) as running:
        running.until_ready()
        connections = [send(running, {**SLOW, "max_tokens": 100}) for _ in range(4)]
        for connection in connections:  # both engines die: those that moved are refused
            assert connection.getresponse().status in (200, 503)
            connection.close()
        until(lambda: metric(running, "asyncllm_replica_deaths_total") == {"": 2}, 40)
        until(lambda: running.status("/ready") == 200)
        until(lambda: metric(running, "asyncllm_replicas_ready") == {"": 2}, 40)
        stopped = children(running.process.pid)[0]
        os.kill(stopped, signal.SIGSTOP)
        connections = [send(running, {"prompt": "ab", "max_tokens": 2}) for _ in range(4)]
        for connection in connections:
            assert json.load(connection.getresponse())["text"] == "ab"
            connection.close()
        until(lambda: stopped not in children(running.process.pid))
        until(lambda: metric(running, "asyncllm_replicas_ready") == {"": 2}, 40)
        replicas = children(running.process.pid)
        stream = send(running, {**STREAM, "max_tokens": 4000})
        answer = stream.getresponse()
        os.kill(running.process.pid, signal.SIGSTOP)  # streams do not need it
        assert len([answer.readline() for _ in range(40)]) == 40
        os.kill(running.process.pid, signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in replicas))
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
        stream.close()
    assert "is stopped: killing it" in "".join(running.log)
