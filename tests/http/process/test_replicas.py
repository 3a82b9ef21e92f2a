"""Several replicas behind one port: where requests go, and what happens when a replica dies."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
from contextlib import closing
from typing import Any

import pytest

from tests.http.process.test_supervise import STREAM, Supervised, children, supervised, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")

#: Takes a second or two.
SLOW = {"prompt": "ab" * 25, "max_tokens": 50, "ignore_eos": True}


def send(running: Supervised, body: Any, path: str = "/generate") -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=40)
    connection.request("POST", path, json.dumps(body))
    return connection


def loads(running: Supervised) -> list[int]:
    """How many requests each replica serves."""
    found = json.loads(running.ask("GET", "/load")[2])
    each = [replica["server_load"] for replica in found["replicas"]]
    assert found["server_load"] == sum(each)
    return each


def metric(running: Supervised, name: str) -> dict[str, float]:
    """The samples of a metric, by their labels."""
    page = running.ask("GET", "/metrics")[2].decode()
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return {line.rpartition(" ")[0].removeprefix(name): float(line.split()[-1]) for line in lines}


def raw(running: Supervised, data: bytes, *, then_ends: bool = False) -> bytes:
    """Everything that is answered to these bytes until the connection ends."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        client.sendall(data)
        if then_ends:
            client.shutdown(socket.SHUT_WR)
        received = b""
        while more := client.recv(65536):
            received += more
        return received


def test_one_port_answers_for_all() -> None:
    with supervised(replicas=2, step_seconds=0.02) as running:
        running.until_ready()
        streams = [send(running, {**STREAM, "prompt": f"{i}"}) for i in range(6)]
        until(lambda: loads(running) == [3, 3])
        health = json.loads(running.ask("GET", "/health")[2])
        assert [replica["status"] for replica in health["replicas"]] == [health["status"]] * 2
        assert all(stream.getresponse().read().endswith(b"[DONE]\n\n") for stream in streams)

        # One connection, several conversations: each is answered where it began.
        with closing(http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)) as client:
            sock = None
            for path, status in (("/ready", 200), ("/v1/models", 200), ("/nothing", 404)):
                client.request("GET", path)
                answer = client.getresponse()
                assert (answer.status, bool(answer.read())) == (status, True)
                assert sock in (None, client.sock)
                sock = client.sock
            client.request("HEAD", "/health", headers={"X-Request-Id": "mine"})
            answer = client.getresponse()
            assert (answer.headers["X-Request-Id"], answer.read()) == ("mine", b"")
            for i in range(4):
                client.request("POST", "/generate", json.dumps({"prompt": f"{i}", "max_tokens": 9}))
                assert json.load(client.getresponse())["text"] == f"{i}"
            assert client.sock is sock
        assert metric(running, "asyncllm_requests_finished_total")['{reason="stop"}'] == 4
        assert metric(running, "asyncllm_replicas_ready") == {"": 2}
        assert len(metric(running, "asyncllm_requests_running")) == 2

        # A response is continued and found where it is kept.
        body = {"input": "ab", "max_output_tokens": 20}
        made = [json.loads(running.ask("POST", "/v1/responses", body)[2]) for _ in range(3)]
        for response in made * 2:
            more = {**body, "previous_response_id": response["id"]}
            assert running.ask("POST", "/v1/responses", more)[0] == 200
            item = {"type": "item_reference", "id": response["output"][0]["id"]}
            assert running.ask("POST", "/v1/responses", {**body, "input": [item]})[0] == 200
            assert running.status(f"/v1/responses/{response['id']}") == 200

        # By its name a request is found where it is.
        named = send(running, {**SLOW, "max_tokens": 4000, "stream": True})
        answer = named.getresponse()
        path = f"/v1/requests/{answer.headers['X-Request-Id']}"
        assert running.ask("GET", f"{path}/trace")[0] == 200
        assert running.ask("POST", f"{path}/abort")[0] == 200
        assert b'"abort"' in answer.read()
        assert running.ask("POST", "/v1/requests/nobody/abort")[0] == 404
        for stream in (*streams, named):
            stream.close()
        running.process.terminate()
        assert running.end() == 0
    assert "Traceback" not in "".join(running.log)


@pytest.mark.parametrize("replicas", [1, 2])
def test_strangers_pages_cannot_use_a_server_without_keys(replicas: int) -> None:
    options = {"allowed_hosts": ["llm.example.org"], "cors_origin": ["https://app.example.org"]}
    with supervised(replicas=replicas, server=options) as running:
        running.until_ready()

        def status(method: str, path: str, body: Any = None, **headers: str) -> int:
            address = ("127.0.0.1", running.port)
            with closing(http.client.HTTPConnection(*address, timeout=20)) as client:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                client.request(method, path, None if body is None else json.dumps(body), named)
                return client.getresponse().status

        body = {"prompt": "ab", "max_tokens": 2}
        for _ in range(2 * replicas):
            for path in ("/health", "/ready", "/load", "/metrics", "/v1/models", "/live", "/"):
                assert status("GET", path, Host="evil.example.com") == 403, path
                assert status("GET", path, Host=f"localhost:{running.port}") == 200, path
            assert status("POST", "/generate", body, Origin="https://evil.example.com") == 403
            assert status("POST", "/live/3/abort", {}, Sec_Fetch_Site="cross-site") == 403
            assert status("POST", "/generate", body) == 200
            allowed = {"Host": "llm.example.org", "Origin": "https://app.example.org"}
            assert status("POST", "/generate", body, **allowed) == 415
            assert (
                status("POST", "/generate", body, **allowed, Content_Type="application/json") == 200
            )


def test_many_clients_at_once_and_some_that_do_not_behave() -> None:
    options = {"max_body_bytes": 3_000_000}
    with supervised(replicas=2, max_running=300, max_waiting=500, server=options) as running:
        running.until_ready()
        statuses: list[int] = []

        def ask(i: int) -> None:
            for turn in range(3):
                connection = send(running, {"prompt": f"{i} {turn}", "max_tokens": 3})
                statuses.append(connection.getresponse().status)
                connection.close()

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [200] * 600

        for data in (
            b"\0" * 1000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"GET /health HTTP/1.1\r\nContent-Length: x\r\n\r\n",
            b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"x" * 100_000,
        ):
            assert b" 400 " in raw(running, data)[:20] or b" 431 " in raw(running, data)[:20]
        body = json.dumps({"prompt": "abc", "max_tokens": 5}).encode()
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
        one = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        last = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
        chunked %= (len(body), body)
        for data in (one + last, one + one + last, chunked + last):
            answers = raw(running, data)
            assert answers.count(b'"text":"abc"') + 1 == answers.count(b"HTTP/1.1 200")
            assert b'"ready"' in answers
        # Only its sending side is closed; and a body that is read by the replica.
        assert b'"text":"abc"' in raw(running, one, then_ends=True)
        padded: dict[str, Any] = {"prompt": "abc", "max_tokens": 5, "user": "x" * 2_500_000}
        assert json.loads(running.ask("POST", "/generate", padded)[2])["text"] == "abc"
        padded["user"] *= 2
        assert running.ask("POST", "/generate", padded)[0] == 413
        # Those who say nothing, or leave in the middle, take nothing from others.
        silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(50)]
        for i, client in enumerate(silent):
            client.sendall(one[: 7 * i])
        assert running.status("/ready") == 200
        for client in silent:
            client.close()
        until(lambda: loads(running) == [0, 0])
        until(lambda: metric(running, "asyncllm_http_requests_live") == _both(0.0))
        running.process.terminate()
        assert running.end() == 0
    assert "Traceback" not in "".join(running.log)


def _both(value: float) -> dict[str, float]:
    return {f'{{replica="{i}"}}': value for i in (0, 1)}


def test_streams_finish_after_a_signal() -> None:
    with supervised(replicas=2, step_seconds=0.03) as running:
        running.until_ready()
        streams = [send(running, STREAM) for _ in range(20)]
        answers = [stream.getresponse() for stream in streams]
        running.process.terminate()
        until(lambda: running.status("/ready") == 503)
        assert json.loads(running.ask("GET", "/health")[2])["status"] == "draining"
        assert running.ask("POST", "/generate", SLOW)[0] == 503
        for answer in answers:
            assert b'"finish_reason":"length"' in answer.read()
        assert running.end() == 0
        for stream in streams:
            stream.close()


def test_a_replica_that_drains_gets_no_new_requests() -> None:
    with supervised(replicas=2, step_seconds=0.03) as running:
        running.until_ready()
        streams = [send(running, {**STREAM, "max_tokens": 4000}) for _ in range(2)]
        answers = [stream.getresponse() for stream in streams]
        until(lambda: loads(running) == [1, 1])
        os.kill(children(running.process.pid)[0], signal.SIGTERM)
        until(lambda: metric(running, "asyncllm_replicas_ready") == {"": 1})
        for i in range(4):
            assert running.ask("POST", "/generate", {"prompt": f"{i}", "max_tokens": 2})[0] == 200
        for answer, stream in zip(answers, streams, strict=True):
            answer.close()
            stream.close()
        until(lambda: len(children(running.process.pid)) == 1)
        running.process.terminate()
        assert running.end() == 0
