"""What the front reads of requests, and what it makes of the replicas' answers."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from asyncllm.front.answers import Answer, as_bytes, health, load, merger, read_answer, ready, worst
from asyncllm.front.client import Client, Room
from asyncllm.front.metrics import Totals
from asyncllm.front.request import closing, home_of, read_head


@pytest.mark.parametrize(
    ("lines", "body_bytes", "is_last"),
    [
        ("POST /generate?x=1 HTTP/1.1\r\ncontent-LENGTH:  12 ", 12, False),
        ("POST /generate HTTP/1.1", 0, False),
        ("POST /generate HTTP/1.1\r\nConnection: keep-alive, Close", 0, True),
        ("POST /generate HTTP/1.0\r\nContent-Length: 3", 3, True),
        # Left to a replica, which knows what they mean.
        ("POST /generate HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1", None, False),
        ("POST /generate HTTP/1.1\r\nContent-Length: 1, 1", None, False),
        ("POST /generate HTTP/1.1\r\nContent-Length : 1", None, False),
        ("POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked", None, False),
        ("POST /generate HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9", None, False),
    ],
)
def test_heads(lines: str, body_bytes: int | None, is_last: bool) -> None:
    data = f"{lines}\r\n\r\n".encode()
    head = read_head(data + b"more")
    assert head is not None
    assert (head.method, head.path) == ("POST", "/generate")
    assert (head.num_bytes, head.body_bytes, head.is_last) == (len(data), body_bytes, is_last)
    assert read_head(data[:-1]) is None


def test_what_is_kept_of_requests_is_bounded() -> None:
    room, (ours, theirs) = Room(100), socket.socketpair()
    with theirs:
        client = Client(ours, 1, room)
        client.add(b"POST / HTTP/1.1\r\nContent-Length: 90\r\n\r\n")
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


def test_what_is_not_http_has_a_head_too() -> None:
    head = read_head(b"\0\xff \r\n\r\n")
    assert head is not None
    assert (head.method, head.path, head.is_last) == ("", "", True)


def test_a_head_with_bare_line_feeds_is_left_to_a_replica() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        client = Client(ours, 1, Room(100))
        client.add(b"GET / HTTP/1.1\r\nHost: x\r")
        assert not client.is_enough()
        client.add(b"\nAccept: y\n")
        assert client.is_enough()
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


def test_a_question_ends_its_connection() -> None:
    asked = b"HEAD /load HTTP/1.1\r\nConnection: keep-alive\r\nHost: x\r\n\r\n"
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
    bare = as_bytes(one, with_body=False, is_last=False)
    assert b"Content-Length: 2\r\n" in bare
    assert bare.endswith(b"\r\n\r\n")


def test_all_are_as_healthy_as_the_best() -> None:
    busy = answer({"status": "ok", "running": 2, "waiting": 1, "steps_done": 5})
    dead = answer({"status": "dead", "running": 0, "error": {"message": "x"}}, 503)
    found = health([busy, None, dead])
    assert found is not None
    assert found.status == 200
    body = found.json()
    assert (body["status"], body["running"], body["steps_done"]) == ("ok", 2, 5)
    assert [one["status"] for one in body["replicas"]] == ["ok", "dead", "dead"]
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


def test_some_are_ready_and_all_are_counted() -> None:
    no = answer({"error": {}}, 503)
    assert ready([no, None]) == no
    found = ready([no, answer({"status": "ready"})])
    assert found is not None
    assert found.json() == {"status": "ready", "replicas": 2, "replicas_ready": 1}
    found = load([answer({"server_load": 2}), None, answer({"server_load": 3})])
    assert found is not None
    assert found.json()["server_load"] == 5
    assert merger("HEAD", "/ready") is ready
    assert merger("POST", "/v1/completions") is None


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
