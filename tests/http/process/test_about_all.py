"""Requests that are about all replicas, or about what one of them has, however they are written."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.http.process.test_reload import ADMIN, Configured
from tests.http.process.test_supervise import children, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")

ENDLESS: Final = {"max_tokens": 3000, "ignore_eos": True, "stream": True}
REPLICAS: Final = (0, 1)
#: What numbers of the live view are multiplied by.
NUMBERS: Final = 256


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    made = Configured(tmp_path_factory.mktemp("all"), "--dp", "2")
    yield made
    assert made.process.stop() == 0


class Raw:
    """A connection, on which whole answers are read one by one."""

    def __init__(self, running: Configured):
        self.socket = socket.create_connection(("127.0.0.1", running.process.port), timeout=20)
        self._file = self.socket.makefile("rb")

    def ask(self, data: bytes) -> tuple[int, Any]:
        self.socket.sendall(data)
        return self.answer()

    def answer(self) -> tuple[int, Any]:
        """Status and JSON; interim answers are left out."""
        status = 100
        while status == 100:
            status = int(self._file.readline().split()[1])
            headers = http.client.parse_headers(self._file)
        data = self._file.read(int(headers["Content-Length"]))
        is_json = headers.get_content_type() == "application/json"
        return status, json.loads(data) if is_json else data

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def head(line: str, key: str = "first", *more: str) -> bytes:
    lines = (line, "Host: x", f"Authorization: Bearer {key}", *more, "", "")
    return "\r\n".join(lines).encode()


def admits(running: Configured, key: str) -> list[bool]:
    """Whether each replica admits a key: numbers of the live view lead to one each."""
    statuses = [running.ask("GET", f"/live/{10**6 * NUMBERS + i}/trace", key)[0] for i in REPLICAS]
    assert set(statuses) <= {401, 404}
    return [status == 404 for status in statuses]


LINE: Final = "POST /admin/reload HTTP/1.1"
CHUNKED: Final = "Transfer-Encoding: chunked"
#: How a reload may be written; each reaches all replicas.
RELOADS: Final = {
    "plain": head(LINE, ADMIN),
    "with a body": head(LINE, ADMIN, "Content-Length: 2") + b"{}",
    "chunked": head(LINE, ADMIN, CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n",
    "chunked, with a trailer": head(LINE, ADMIN, CHUNKED) + b"0\r\nA: b\r\n\r\n",
    "expects": head(LINE, ADMIN, "Expect: 100-continue", "Content-Length: 2") + b"{}",
    "escaped": head("POST /admin/%72eload HTTP/1.1", ADMIN),
    "all escaped": head("POST /%61dmin/r%65load?a=b HTTP/1.1", ADMIN),
    "absolute": head("POST http://x/admin/reload HTTP/1.1", ADMIN),
    "absolute and escaped": head("POST HTTP://y:1/admin/relo%61d HTTP/1.1", ADMIN, CHUNKED)
    + b"0\r\n\r\n",
    "with a query": head("POST /admin/reload?x=/../y HTTP/1.1", ADMIN),
    "with a fragment": head("POST /admin/reload#x HTTP/1.1", ADMIN),
    "old": head("POST /admin/reload HTTP/1.0", ADMIN),
    "old, kept alive": head("POST /admin/reload HTTP/1.0", ADMIN, "Connection: keep-alive"),
    "odd headers": head(LINE, ADMIN, "A_B: \xe9", "Connection: x, keep-alive", "Upgrade: h2c"),
    "many headers": head(LINE, ADMIN, *(f"A{i}: {'x' * 200}" for i in range(97))),
    "second in a row": head("GET /version HTTP/1.1") + head(LINE, ADMIN),
    "second, escaped and chunked": head("GET /health HTTP/1.1")
    + head("POST /%61dmin/reload HTTP/1.1", ADMIN, CHUNKED)
    + b"0\r\n\r\n",
}


@pytest.mark.parametrize("name", RELOADS)
def test_a_reload_reaches_all_replicas_however_it_is_written(
    running: Configured, name: str
) -> None:
    data = RELOADS[name]
    running.write(keys=f"first\n{len(name)}{hash(name)}\n")
    new = running.keys.read_text().split()[1]
    assert not any(admits(running, new))
    with closing(Raw(running)) as client:
        status, answer = client.ask(data)
        if name.startswith("second"):
            status, answer = client.answer()
    assert (status, answer) == (200, {"changed": ["api_key_file"], "needs_restart": []})
    assert all(admits(running, new))
    running.write()
    with closing(Raw(running)) as client:
        assert client.ask(data[data.rfind(b"POST ") :])[0] == 200
    assert not any(admits(running, new)), "it is revoked everywhere"


@pytest.mark.parametrize(
    "line",
    [
        "HEAD /admin/reload HTTP/1.1",
        "GET /admin/reload HTTP/1.1",
        "OPTIONS /admin/reload HTTP/1.1",
        "PUT /admin/reload HTTP/1.1",
        "POST //admin/reload HTTP/1.1",
        "POST /admin//reload HTTP/1.1",
        "POST /admin/reload/ HTTP/1.1",
        "POST /admin%2Freload HTTP/1.1",
        "POST /x/../admin/./reload HTTP/1.1",
        "post /admin/reload HTTP/1.1",
        "POST /admin/reload HTTP/1.1 x",
    ],
)
def test_what_is_no_reload_changes_nothing(running: Configured, line: str) -> None:
    running.write(keys="first\nother\n")
    with closing(Raw(running)) as client:
        client.socket.sendall(head(line, ADMIN, "Connection: close"))
        status = int(client._file.readline().split()[1])
    assert status in (400, 401)
    assert not any(admits(running, "other"))
    running.write()


def test_a_refused_reload_is_refused_in_any_writing(running: Configured) -> None:
    running.write(extra="no-such-option: 1\n")
    for data in (RELOADS["plain"], RELOADS["chunked"], RELOADS["absolute"]):
        with closing(Raw(running)) as client:
            status, answer = client.ask(data)
            assert (status, "no-such-option" in answer["error"]["message"]) == (400, True)
            assert client.ask(data.replace(ADMIN.encode(), b"first"))[0] == 401
    running.write()
    assert running.reload()[0] == 200


@pytest.mark.parametrize(("method", "path"), [("POST", "/admin/reload"), ("GET", "/live")])
def test_headers_of_the_replicas_answers_are_there(
    running: Configured, method: str, path: str
) -> None:
    with closing(running.connect()) as client:
        client.request(method, path, headers={"Authorization": "Bearer wrong", "X-Request-Id": "a"})
        answer = client.getresponse()
        headers = answer.headers
        assert (answer.status, json.load(answer)["error"]["code"]) == (401, "invalid_api_key")
    found = [headers.get_all(name) for name in ("WWW-Authenticate", "X-Request-Id", "Server")]
    assert found == [["Bearer"], ["a"], ["asyncllm"]]


class Stream:
    """An answer that goes on until its request is ended."""

    def __init__(self, running: Configured, prompt: str, name: str, key: str = "first"):
        self.name = name
        self._connection = running.connect()
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": name}
        body = json.dumps({"prompt": prompt, **ENDLESS})
        self._connection.request("POST", "/generate", body, headers)
        self._answer = self._connection.getresponse()
        assert self._answer.readline().startswith(b"data: {")

    def is_aborted(self) -> bool:
        """Reads to the end."""
        return b'"finish_reason":"abort"' in self._answer.read()

    def close(self) -> None:
        self._connection.close()


def live(running: Configured) -> Any:
    status, state = running.ask("GET", "/live", ADMIN)
    assert status == 200
    return state


def rows(running: Configured) -> dict[str, Any]:
    return {row["name"]: row for row in live(running)["running"]}


def test_a_number_of_the_live_view_is_of_one_request_of_all_replicas(running: Configured) -> None:
    streams = [Stream(running, f"{i}", f"live-{i}") for i in range(6)]
    until(lambda: len(rows(running)) == 6)
    seen = rows(running)
    assert {row["replica"] for row in seen.values()} == set(REPLICAS)
    assert len({row["id"] for row in seen.values()}) == 6
    state = live(running)
    assert (state["replicas"], state["missing"], state["num_running"]) == ([0, 1], [], 6)
    assert {step[6] for step in state["steps"]} == set(REPLICAS)
    for stream in streams * 2:
        status, trace = running.ask("GET", f"/live/{seen[stream.name]['id']}/trace", ADMIN)
        assert (status, trace["id"]) == (200, stream.name)
        assert running.ask("GET", f"/v1/requests/{stream.name}/trace", "first")[0] == 200
    writings = ("/live/{}/abort", "/l%69ve/{}/abort", "http://x/live/{}/abort")
    for i, stream in enumerate(streams):
        line = f"POST {writings[i % 3].format(seen[stream.name]['id'])} HTTP/1.1"
        before = b"" if i % 2 else head("GET /version HTTP/1.1")
        with closing(Raw(running)) as client:
            client.socket.sendall(before + head(line, ADMIN, CHUNKED) + b"0\r\n\r\n")
            answers = [client.answer() for _ in range(1 if i % 2 else 2)]
        assert answers[-1] == (200, {"id": stream.name, "aborted": True})
        assert stream.is_aborted()
        stream.close()
        left = {other.name for other in streams[i + 1 :]}
        until(lambda left=left: rows(running).keys() == left)  # type: ignore[misc]
    until(lambda: not rows(running))
    ended = {row["name"]: row["id"] for row in live(running)["ended"]}
    assert all(ended[stream.name] == seen[stream.name]["id"] for stream in streams)


def test_a_name_that_was_used_twice_is_the_latest_requests(running: Configured) -> None:
    streams = [Stream(running, f"twice {i}", "twice") for i in range(2)]
    others = Stream(running, "of another key", "twice", key="second")
    until(lambda: live(running)["num_running"] == 3)
    at = {row["replica"] for row in live(running)["running"] if row["tenant"] == "key-1"}
    assert at == set(REPLICAS)
    path = "/v1/requests/tw%69ce/abort"
    assert running.ask("POST", path, "first") == (200, {"id": "twice", "aborted": True})
    assert streams[1].is_aborted()
    until(lambda: live(running)["num_running"] == 2)  # the one before goes on, and another key's
    assert running.ask("POST", path, "second")[0] == 200
    assert others.is_aborted()
    assert running.ask("POST", path, "first")[0] == 404, "the latest has ended"
    assert running.ask("POST", "/v1/requests/nobody%0d%0aA:%20b/abort", "first")[0] == 404
    for stream in (*streams, others):
        stream.close()
    until(lambda: live(running)["num_running"] == 0)


def test_a_response_is_continued_and_ended_where_it_is_in_any_writing(running: Configured) -> None:
    made = []
    for i in range(4):
        body = {"input": f"{i}" * 500, "max_output_tokens": 4}
        status, response = running.ask("POST", "/v1/responses", "first", body)
        assert status == 200
        made.append(response)
    assert {response["id"][-2:] for response in made} == {"00", "01"}
    for response in made:
        path = f"/v1/r%65sponses/{response['id']}"
        assert running.ask("GET", path, "first")[1] == response
        assert running.ask("GET", path, "second")[0] == 404
        status, items = running.ask("GET", f"{path}/input_items", "first")
        assert status == 200
        # Longer than what the front looks at, in chunks, escaped, and by an item without a home.
        writings: list[dict[str, Any]] = [
            {"user": "x" * 2**20, "input": "x", "previous_response_id": response["id"]},
            {"input": "x", "previous_response_id": response["id"]},
            {"input": [{"type": "item_reference", "id": items["first_id"]}]},
            {"input": [{"type": "item_reference", "id": response["output"][0]["id"]}]},
        ]
        for number, body in enumerate(writings):
            data = json.dumps({**body, "max_output_tokens": 2}).encode()
            line = f"POST {'http://x' if number % 2 else ''}/v1/responses HTTP/1.1"
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
            with closing(Raw(running)) as client:
                for _ in range(2):  # the connection is as any other after it
                    status, answer = client.ask(head(line, "first", CHUNKED) + data)
                    assert status == 200, answer
                    assert answer["id"][-2:] == response["id"][-2:]
        assert running.ask("DELETE", path, "first")[0] == 200
        assert running.ask("GET", path, "first")[0] == 404
    for home in ("02", "ff"):
        assert running.ask("GET", f"/v1/responses/resp_{'0' * 30}{home}", "first")[0] == 404


def test_nothing_new_waits_for_a_replica_that_is_stopped(running: Configured) -> None:
    replicas = children(running.process.process.pid)
    with closing(running.connect()) as client:
        stopped = replicas[0]
        os.kill(stopped, signal.SIGSTOP)
        longest, states, paths = 0.0, set(), ["/health", "/ready"]
        while Path(f"/proc/{stopped}").exists():
            for path in paths:
                began = time.monotonic()
                client.request("GET", path, headers={"Authorization": "Bearer first"})
                answer = client.getresponse()
                data = answer.read()
                longest = max(longest, time.monotonic() - began)
                assert answer.status == 200
                if path == "/health":
                    state = json.loads(data)["replicas"][0]
                    states.add(state["status"])
                    assert state.get("age", 0) < 20
            if state.get("age") and len(paths) == 2:  # the front knows it by now
                for path, key in (
                    (f"/live/{10**6 * NUMBERS}/trace", ADMIN),
                    (f"/v1/responses/resp_{'0' * 32}", "first"),
                    ("/v1/requests/nobody/trace", "first"),
                ):
                    status, refused = running.ask("GET", path, key)
                    assert (status, "replica 0" in refused["error"]["message"]) == (503, True)
                paths = ["/health", "/ready", "/version", "/l%6fad", "/load", "/metrics", "/live"]
            time.sleep(0.02)
    # Measured 55 ms; CI's machines do other things, too.
    assert longest < 1.0
    assert states & {"idle", "ok"}, "what it said last"
    # What is reloaded while it starts again, it has when it serves.
    running.write(keys="first\nlate\n")
    assert running.reload()[0] == 200
    until(lambda: running.ask("GET", "/ready")[1].get("replicas_ready") == 2)
    # A number of the process that is gone is nobody's.
    stream = Stream(running, "the first of its process", "reborn")
    until(lambda: "reborn" in rows(running))
    assert (rows(running)["reborn"]["replica"], rows(running)["reborn"]["id"] > 10**9) == (0, True)
    for number in (NUMBERS, NUMBERS + 5, 2 * 10**9 * NUMBERS + NUMBERS):
        assert running.ask("POST", f"/live/{number}/abort", ADMIN)[0] == 404
    assert running.ask("POST", f"/live/{rows(running)['reborn']['id']}/abort", ADMIN)[0] == 200
    assert stream.is_aborted()
    stream.close()
    assert admits(running, "late") == [True, True]
    assert admits(running, "second") == [False, False]
    running.write()
    assert running.reload()[0] == 200


def test_a_reload_reaches_a_replica_that_is_starting(running: Configured) -> None:
    """It has begun with what was in force before, and files are wrong when it takes requests."""
    parent = running.process.process.pid
    victim, other = children(parent)
    os.kill(victim, signal.SIGKILL)
    until(lambda: len(set(children(parent)) - {victim}) == 2)
    [starting] = set(children(parent)) - {victim, other}
    os.kill(starting, signal.SIGSTOP)
    running.write(keys="first\nlate\n")
    assert running.reload()[0] == 200
    running.write(keys="first\nsecond\n", extra="no-such-option: 1\n")
    os.kill(starting, signal.SIGCONT)
    until(lambda: running.ask("GET", "/ready")[1].get("replicas_ready") == 2)
    assert admits(running, "late") == [True, True]
    assert admits(running, "second") == [False, False]
    running.write()
    assert running.reload()[0] == 200
