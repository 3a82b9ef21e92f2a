"""What the front reads of requests, and what it makes of the replicas' answers."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import closing as closing_of
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import HttpRequestParser
from hypothesis import event, given, settings
from hypothesis import strategies as st

from asyncllm.supervise.front.answers import (
    Answer,
    Known,
    as_bytes,
    health,
    load,
    read_answer,
    ready,
    refusal,
    seek,
    worst,
)
from asyncllm.supervise.front.metrics import Totals
from asyncllm.supervise.front.reader import Client, Room
from asyncllm.supervise.front.request import MOST_HEAD, Head, closing, home_of, read_head


@pytest.mark.parametrize(
    ("lines", "body_bytes"),
    [
        ("POST /generate?x=1 HTTP/1.1\r\ncontent-LENGTH:  12 ", 12),
        ("POST /generate HTTP/1.1", 0),
        ("POST /generate HTTP/1.0\r\nContent-Length: 3\r\nX_y: \xe9\r\nX_y: b", 3),
        # Replicas know what they mean.
        ("POST /generate HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1", None),
        ("POST /generate HTTP/1.1\r\nContent-Length: 1, 1", None),
        ("POST /generate HTTP/1.1\r\nContent-Length: +1", None),
        ("POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked", None),
        ("POST /generate HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9", None),
        ("POST /generate HTTP/1.1\r\nUpgrade: websocket\r\nContent-Length: 9", None),
    ],
)
def test_heads(lines: str, body_bytes: int | None) -> None:
    head = read_head(f"{lines}\r\n\r\n".encode("latin-1"))
    assert (head.path, head.body_bytes, head.probe) == ("/generate", body_bytes, "")


@pytest.mark.parametrize(
    "lines",
    [
        "\0\xff ",
        "GET http://x/health HTTP/1.1\r\nHost: x",
        "GET  /health HTTP/1.1\r\nHost: x",
        "GET /health HTTP/2.0\r\nHost: x",
        "GET /health",
        "get /health HTTP/1.1\r\nHost: x",
        "GET /health HTTP/1.1\r\nHost : x",
        "GET /health HTTP/1.1\r\nHost: x\r\n folded",
        "GET /health HTTP/1.1\r\nHost: x\nA: b",
        "GET /health HTTP/1.1\r\nHost: x\rA: b",
        "GET /health HTTP/1.1\r\nHost: x\0",
        "GET /health HTTP/1.1\r\nHost",
    ],
)
def test_an_unusual_head_says_nothing(lines: str) -> None:
    data = f"{lines}\r\n\r\n".encode("latin-1")
    assert read_head(data) == Head(len(data))


PROBE = "GET /health HTTP/1.1\r\nHost: x"


@pytest.mark.parametrize(
    ("lines", "probe"),
    [
        (PROBE, "health"),
        (f"{PROBE}\r\nConnection: Close\r\nUser-Agent: y", "health"),
        ("HEAD /ready?a=b HTTP/1.1\r\nHOST: x\r\nAccept: */*", "ready"),
        ("GET /load HTTP/1.0", "load"),
        ("GET /ping HTTP/1.0\r\nHost: x", "health"),
        # A replica would answer, too; but whether it would answer just this is not certain here.
        ("GET /health HTTP/1.1", ""),
        ("GET /health HTTP/1.0\r\nConnection: keep-alive", ""),
        (f"{PROBE}\r\nHost: x", ""),
        (f"{PROBE}\r\nConnection: keep-alive, close", ""),
        (f"{PROBE}\r\nContent-Length: 0", ""),
        (f"{PROBE}\r\nTransfer-Encoding: chunked", ""),
        (f"{PROBE}\r\nExpect: 100-continue", ""),
        (f"{PROBE}\r\nUpgrade: h2c", ""),
        (f"{PROBE}\r\nUser-Agent: \xe9", ""),
        (f"{PROBE}\r\nSec-WebSocket-Key1: x", ""),
        ("POST /health HTTP/1.1\r\nHost: x", ""),
        ("GET /%68ealth HTTP/1.1\r\nHost: x", ""),
        ("GET //health HTTP/1.1\r\nHost: x", ""),
        ("GET /health/ HTTP/1.1\r\nHost: x", ""),
        ("GET /health#a HTTP/1.1\r\nHost: x", ""),
        ("POST /admin/reload HTTP/1.1\r\nHost: x", ""),
    ],
)
def test_only_what_is_certain_is_a_probe(lines: str, probe: str) -> None:
    assert read_head(f"{lines}\r\n\r\n".encode("latin-1")).probe == probe


def test_what_is_kept_of_requests_is_bounded() -> None:
    room, (ours, theirs) = Room(100), socket.socketpair()
    with theirs:
        client = Client(ours, 1, room)
        client.add(b"POST /generate HTTP/1.1\r\nContent-Length: 90\r\n\r\n")
        assert not client.is_enough()
        client.add(b"x" * 80)
        assert (room.left < 0, client.is_enough(), client.is_whole()) == (True, True, False)
        client.reset()
        assert room.left == 100
        client.add(b"GET / HTTP/1.1\r\n\r\n")
        assert client.is_enough()
        assert client.is_whole()
        client.close()
        assert room.left == 100


def test_a_head_is_read_once_however_it_comes() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        client = Client(ours, 1, Room(2**20))
        request = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        for byte in request[:-4]:
            client.add(bytes([byte]))
            assert not client.is_enough()
            assert client.head is None or client.head.body_bytes == 3
        client.add(request[-4:])
        assert client.is_enough()
        assert client.is_whole()
        # What does not begin like a request, or is long, is for a replica at once.
        for data in (b"\x16\x03\x01", b"\r\n", b"get", b"G" * (MOST_HEAD + 1)):
            client.reset()
            client.add(data)
            assert client.is_enough()
        client.close()


def test_what_a_thousand_pieces_cost_does_not_grow_with_what_is_there() -> None:
    """Bytes that were looked at are not looked at again."""
    ours, theirs = socket.socketpair()
    with theirs:
        client = Client(ours, 1, Room(2**24))
        client.add(b"POST /generate HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n")
        before = client.data
        for _ in range(1000):
            client.add(b"x")
        assert client.data is before
        client.close()


def test_a_response_is_continued_where_it_is() -> None:
    there = f"{30 * 'a'}07"
    for body in (
        {"previous_response_id": f"resp_{there}"},
        {"input": [{"type": "item_reference", "id": f"msg_{there}0001"}]},
    ):
        assert home_of("/v1/responses", json.dumps(body).encode()) == 7
    assert home_of(f"/v1/responses/resp_{there}/cancel", b"") == 7
    quoted = json.dumps({"input": json.dumps(body)}).encode()
    assert home_of("/v1/responses", quoted) is None
    assert home_of("/v1/chat/completions", json.dumps(body).encode()) is None
    assert home_of(f"/live/{5 * 256 + 3}/abort", b"") == 3
    assert home_of("/live/x/abort", b"") is None


def test_a_question_ends_its_connection() -> None:
    asked = b"HEAD /load HTTP/1.1\r\nconnection: keep-alive\r\nHost: x\r\n\r\n"
    assert closing(asked) == b"GET /load HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def answer(body: Any, status: int = 200) -> Answer:
    return Answer(status, ((b"content-type", b"application/json"),), json.dumps(body).encode())


def test_an_answer_is_read_and_written() -> None:
    headers = ((b"retry-after", b"3"), (b"access-control-allow-origin", b"*"))
    one = Answer(503, headers, b"no")
    data = as_bytes(one, with_body=True, is_last=True)
    assert read_answer(data) == one
    assert data.startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 3\r\n")
    assert read_answer(data[:30]) is None
    assert read_answer(data[:-1]) is None
    assert read_answer(b"") is None
    bare = as_bytes(one, with_body=False)
    assert b"Content-Length: 2\r\n" in bare
    assert bare.endswith(b"\r\n\r\n")
    old = as_bytes(one, is_last=True, version="HTTP/1.0")
    assert old.startswith(b"HTTP/1.0 503 ")
    assert b"Connection" not in old


def test_all_are_as_healthy_as_the_best() -> None:
    busy = answer({"status": "ok", "running": 2, "waiting": 1, "steps_done": 5})
    dead = answer({"status": "dead", "running": 0, "error": {"message": "x"}}, 503)
    found = health([busy, None, dead])
    assert found is not None
    assert found.status == 200
    body = found.json()
    assert (body["status"], body["running"], body["steps_done"]) == ("ok", 2, 5)
    assert [one["status"] for one in body["replicas"]] == ["ok", "dead", "dead"]
    assert [one.get("age") for one in body["replicas"]] == [0.0, None, 0.0]
    found = health([dead, None])
    assert found is not None
    assert (found.status, found.json()["error"]) == (503, {"message": "x"})
    wrong = answer({"error": {}}, 400)
    for merge in (health, ready, load, worst):
        assert merge([wrong, wrong]) == wrong
        assert merge([None, None]) is None


def test_a_merged_answer_has_the_headers_of_one() -> None:
    one = answer({"status": "ok"})._replace(headers=((b"x-request-id", b"mine"),))
    for merge in (health, ready, load):
        found = merge([None, one, one])
        assert found is not None
        assert (found.status, found.headers) == (200, one.headers)
        assert found.body != one.body


@pytest.mark.parametrize(
    ("said", "is_ready", "leaves", "hangs", "status", "state"),
    [
        (b"", False, False, False, 200, "loading"),
        (b'{"health":{"status":"ok","running":2}}', True, False, False, 200, "ok"),
        (b'{"health":{"status":"ok"}}', False, True, False, 200, "draining"),
        (b'{"health":{"status":"ok"}}', True, False, True, 503, "silent"),
        (b'{"health":{"status":"dead","error":{"message":"x"}}}', False, False, False, 503, "dead"),
    ],
)
def test_what_is_known_of_a_replica_stands_for_its_answer(
    said: bytes, is_ready: bool, leaves: bool, hangs: bool, status: int, state: str
) -> None:
    known = Known(said, 1.23456, is_ready, leaves, hangs)
    found = known.instead("health")
    assert (found.status, found.json()["status"], found.json()["age"]) == (status, state, 1.235)
    assert known.instead("ready").status == (200 if is_ready else 503)
    whole = health([None, found])
    assert whole is not None
    assert (whole.status, whole.json()["status"]) == (status, state)
    assert ("error" in whole.json()) == (status == 503)


def test_a_reload_has_reached_all_or_failed() -> None:
    done = answer({"changed": [], "needs_restart": []})
    assert worst([done, None]) == done, "a replica without a process reads all when it starts"
    silent = refusal("replica 1 does not answer; try again")
    assert worst([done, silent]) == silent
    wrong = answer({"error": {}}, 400)
    assert worst([done, wrong]) == wrong


def test_a_name_is_found_where_it_was_used_last() -> None:
    old, new = (answer({"replica": i, "came": 1.0 + i}) for i in (0, 1))
    none = answer({"replica": 2, "came": None})
    assert seek([old, new, none, None]) == new
    assert seek([new, old]) == new
    found = seek([none, None])
    assert found is not None
    assert found.json() == {"replica": None}
    assert seek([none, refusal("replica 1 does not answer")]) == refusal(
        "replica 1 does not answer"
    )
    assert seek([None]) is None


def test_some_are_ready_and_all_are_counted() -> None:
    no = answer({"error": {}}, 503)
    assert ready([no, None]) == no
    found = ready([no, answer({"status": "ready"})])
    assert found is not None
    assert found.json() == {"status": "ready", "replicas": 2, "replicas_ready": 1}
    found = load([answer({"server_load": 2}), None, answer({"server_load": 3})])
    assert found is not None
    assert found.json()["server_load"] == 5


PAGE = """\
# HELP a_total Things.
# TYPE a_total counter
a_total{{kind="x y"}} {0}.0
# HELP b Level.
# TYPE b gauge
b {0}.0
# HELP h Times.
# TYPE h histogram
h_bucket{{le="+Inf"}} {0}.0
h_count {0}.0
h_sum 0.5
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="m"}} {0}.0
"""


def test_counters_add_up_and_never_go_down() -> None:
    totals = Totals(2)
    lines = totals.merged([PAGE.format(3), PAGE.format(4)]).splitlines()
    assert 'a_total{kind="x y"} 7.0' in lines
    assert {'b{replica="0"} 3.0', 'b{replica="1"} 4.0'} <= set(lines)
    assert {'h_bucket{le="+Inf"} 7.0', "h_count 7.0", "h_sum 1.0"} <= set(lines)
    assert 'vllm:num_requests_running{model_name="m"} 7.0' in lines
    assert sum(line.startswith("# TYPE a_total") for line in lines) == 1
    # One does not answer for a moment: what it said last counts.
    assert 'a_total{kind="x y"} 8.0' in totals.merged([None, PAGE.format(5)])
    totals.lost(0)
    assert 'a_total{kind="x y"} 8.0' in totals.merged([None, PAGE.format(5)])
    assert 'a_total{kind="x y"} 9.0' in totals.merged([PAGE.format(1), PAGE.format(5)])
    assert totals.merged([None, None]) == ""


GOOD_LINES = st.lists(
    st.sampled_from(("User-Agent: a b", "accept:*/*", "X-Request-Id: \t1 ", "Cookie: a=b")),
    max_size=2,
    unique=True,
)
LINES = st.lists(
    st.sampled_from(
        (
            *("Host: x", "host:y", "Host:", "Connection: close", "connection: Keep-Alive"),
            *("Connection: keep-alive, close", "Connection:", "Content-Length: 0", "A : b", "A: b"),
            *("Content-Length: 3", "Transfer-Encoding: chunked", "Expect: x", " a: b", "", "Via"),
            *("Upgrade: websocket", "Sec-WebSocket-Key1: x", "Via: \x01", "Via: \xe9", "Via: \r"),
        )
    ),
    max_size=2,
)
GOOD_STARTS = st.sampled_from(
    ("GET /health HTTP/1.1\r\nHost: x", "HEAD /ready?a HTTP/1.1\r\nhost:y:1", "GET /load HTTP/1.0")
)
STARTS = st.builds(
    "{}{}{}{}{}".format,
    st.sampled_from(("GET", "HEAD", "POST", "get", "", "GETT", "\r\nGET")),
    st.sampled_from((" ", " ", " ", "  ", "\t")),
    st.sampled_from(("/health", "/ready?a", "/load", "/ping#a", "/he%61lth", "//ping", "health")),
    st.sampled_from((" ", " ", " ", "  ", "")),
    st.sampled_from(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/1.1 ", "http/1.1", "")),
)


@settings(max_examples=500, deadline=None)
@given(GOOD_STARTS | GOOD_STARTS | STARTS, GOOD_LINES, LINES)
def test_a_probe_is_what_the_parser_of_replicas_takes_it_for(
    start: str, good: list[str], lines: list[str]
) -> None:
    data = "\r\n".join((start, *good, *lines, "", "")).encode("latin-1")
    head = read_head(data)
    event("a probe" if head.probe else "none")
    if not head.probe:
        return
    with closing_of(asyncio.new_event_loop()) as loop:
        parser = HttpRequestParser(BaseProtocol(loop), loop, 2**16)
        [(message, payload)], upgraded, tail = parser.feed_data(data)
    assert (upgraded, tail, payload.is_eof()) == (False, b"", True)
    assert message.url.path == head.path
    assert message.should_close == head.is_last
    assert f"HTTP/{message.version.major}.{message.version.minor}" == head.version
