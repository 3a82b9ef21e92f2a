"""``trace: true`` in a request, and GET /v1/requests/{id}/trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.request_log import MOST_SEQUENCES, RequestLog, Served
from asyncllm.server.trace import MAX_SEQUENCES
from tests.support.server.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server.serving import Answer, Server

USER: Any = {"role": "user", "content": "a"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/generate": {"prompt": "a"},
}


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **headers}


# -- in the answer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_with_its_trace(server: Server, path: str, n: int) -> None:
    body = ROUTES[path] | {"trace": True, "priority": 2} | ({} if "generate" in path else {"n": n})
    answer = server.post(path, body).json
    check_whole(answer["trace"], body.get("n", 1))
    plain = server.post(path, ROUTES[path] | {"trace": False}).json
    assert answer.keys() - plain.keys() == {"trace"}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_with_its_trace(server: Server, path: str, n: int) -> None:
    options: dict[str, Any] = {"stream": True, "trace": True, "priority": 2}
    if path != "/generate":
        options |= {"n": n, "stream_options": {"include_usage": True}}
    *frames, last = server.post(path, ROUTES[path] | options).frames
    check_whole(last["trace"], options.get("n", 1))
    assert not any("trace" in frame for frame in frames)
    if path == "/generate":
        assert last["text"] == ""
    else:
        assert (last["choices"], last["id"]) == ([], frames[0]["id"])
        assert "usage" in frames[-1]
        assert "usage" not in last


def check_whole(trace: Any, count: int) -> None:
    """Of requests that are over: nothing is missing at the end."""
    assert [entry["index"] for entry in trace["sequences"]] == list(range(count))
    for entry in trace["sequences"]:
        assert entry["outcome"] == "stop"
        assert entry["priority"] == 2
        assert entry["ended_ms"] >= entry["first_token_ms"] > entry["started_ms"] >= 0
        kinds = [event["kind"] for event in entry["events"]]
        assert kinds == ["queued", "admitted", "chunk", "finished"]
        assert entry["events"][-1]["tokens"] == entry["prompt_tokens"] + entry["completion_tokens"]


def test_a_trace_explains_a_bounded_number_of_choices() -> None:
    with serving() as server:
        limits = msgspec.structs.replace(server.llm.limits, max_waiting=100)
        server.call(lambda: setattr(server.llm, "limits", limits))
        answer = server.post("/v1/completions", {"prompt": ["a"] * 10, "n": 4, "trace": True}).json
    assert len(answer["choices"]) == 40
    assert len(answer["trace"]["sequences"]) == MAX_SEQUENCES


def test_a_failure_in_mid_stream_has_no_trace(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.llm, "fail", RuntimeError("secret"))
    body = {"prompt": "a", "stream": True, "trace": True}
    [frame] = server.post("/v1/completions", body).frames
    assert frame["error"]["message"] == "internal server error"


# -- afterwards ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_by_either_id(server: Server, path: str, stream: bool) -> None:
    answer = server.post(path, ROUTES[path] | {"stream": stream})
    ids = [answer.headers["X-Request-Id"]]
    if path != "/generate":
        ids.append((answer.frames[0] if stream else answer.json)["id"])
    found = [server.get(f"/v1/requests/{name}/trace") for name in ids]
    assert [trace.status for trace in found] == [200] * len(ids)
    assert [trace.json["id"] for trace in found] == ids
    for trace in found:
        assert trace.json["sequences"] == found[0].json["sequences"]
        assert trace.json["sequences"][0]["outcome"] == "stop"


@pytest.mark.parametrize("name", ["a/b", "chatcmpl-x", 'q"uo;te', "per%25cent", "trace"])
def test_ids_that_clients_choose(server: Server, name: str) -> None:
    given = name.replace("%25", "%")
    answer = server.post("/v1/completions", {"prompt": "a"}, {"X-Request-Id": given})
    assert answer.headers["X-Request-Id"] == given
    for path in (name, f"cmpl-{name}"):
        assert server.get(f"/v1/requests/{path}/trace").status == 200


def test_unknown_ids(server: Server) -> None:
    for name in ("nobody", "chatcmpl-nobody", "chatcmpl-"):
        answer = server.get(f"/v1/requests/{name}/trace")
        assert (answer.status, answer.json["error"]["param"]) == (404, "id")
    refused = server.post("/v1/completions", {"prompt": ""}, {"X-Request-Id": "refused"})
    assert refused.status == 400
    assert server.get("/v1/requests/refused/trace").status == 404
    assert server.post("/v1/requests/a/trace", {}).status == 405


def test_a_trace_that_the_engine_has_forgotten(server: Server) -> None:
    name = server.post("/generate", {"prompt": "a"}).headers["X-Request-Id"]
    server.call(lambda: server.llm._known.clear())
    assert server.get(f"/v1/requests/{name}/trace").status == 404


def test_while_it_waits_and_runs(server: Server) -> None:
    server.call(server.llm.hold)
    body = {"prompt": "a", "ignore_eos": True, "max_tokens": 3, "n": 2}
    with server.open("/v1/completions", body, extra="X-Request-Id: live\r\n"):
        server.until(lambda: server.llm.stats.waiting == 2)
        entries = server.get("/v1/requests/live/trace").json["sequences"]
        assert [entry["outcome"] for entry in entries] == ["waiting"] * 2
        assert entries[0]["started_ms"] is None
        assert entries[0]["steps"]["count"] == 0
        server.call(server.llm.resume)
        server.until_idle()
    outcomes = [e["outcome"] for e in server.get("/v1/requests/live/trace").json["sequences"]]
    assert outcomes == ["length"] * 2


def test_requests_that_fail(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm, "fail", RuntimeError())
    headers = {"X-Request-Id": "bad"}
    assert server.post("/v1/completions", {"prompt": "a"}, headers).status == 500
    [entry] = server.get("/v1/requests/bad/trace").json["sequences"]
    assert entry["outcome"] == "error"


# -- tenants ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with serving(config=ServerConfig(api_key=("secret-a", "secret-b"))) as server:
        yield server


def trace(server: Server, name: str, key: str) -> Answer:
    return server.get(f"/v1/requests/{name}/trace", bearer(key))


def test_a_key_sees_only_its_own_requests(keyed: Server) -> None:
    answer = keyed.post("/v1/completions", {"prompt": "a"}, bearer("secret-a"))
    for name in (answer.json["id"], answer.headers["X-Request-Id"]):
        mine = trace(keyed, name, "secret-a")
        assert mine.json["sequences"][0]["tenant"] == "key-1"
        assert b"secret" not in mine.body
        foreign = trace(keyed, name, "secret-b")
        unknown = trace(keyed, "nobody", "secret-b")
        assert foreign.status == unknown.status == 404
        assert foreign.body.replace(name.encode(), b"nobody") == unknown.body
        assert keyed.get(f"/v1/requests/{name}/trace").status == 401


def test_an_id_that_two_tenants_use(keyed: Server) -> None:
    for key, prompt in (("secret-a", "a"), ("secret-b", "bbbb"), ("secret-b", "bb")):
        headers = bearer(key, **{"X-Request-Id": "same"})
        body = {"prompt": prompt, "add_special_tokens": False}
        assert keyed.post("/v1/completions", body, headers).status == 200
    lengths = [
        trace(keyed, "same", key).json["sequences"][0]["prompt_tokens"]
        for key in ("secret-a", "secret-b")
    ]
    assert lengths == [1, 2], "each its own, and the latest of them"


def test_the_log_is_bounded() -> None:
    log = RequestLog(most=3)
    served = [Served([i]) for i in range(5)]
    for i in range(5):
        log.add("me", (str(i), f"resp_{i}"), served[i])
    assert [log.find("me", str(i)) for i in range(5)] == served, "none has ended"
    log.add("me", ("2", "resp_7"), again := Served([7]))
    log.add("you", ("9",), other := Served([9]))
    for ended in (*served, again, other):
        log.ended(ended)
    assert len(log) == 3
    assert [log.find_sequence(i) for i in (3, 4, 7)] == [None, served[4], again]
    assert [log.find("me", str(i)) for i in range(5)] == [None, None, again, None, served[4]]
    assert log.find("me", "resp_7") is again
    assert log.find("me", "resp_4") is served[4]
    assert log.find("me", "resp_2") is log.find("you", "4") is log.find("me", "9") is None


# -- pins ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_trace_tells_what_is_pinned(demo: Server, stream: bool) -> None:
    """The answer ends by a stop string, or by its length."""
    body = {"prompt": "Once upon a time, " * 20, "max_tokens": 8, "trace": True, "stream": stream}

    def pinned(**fields: Any) -> list[dict[str, Any]]:
        answer = demo.post("/v1/completions", body | fields)
        [entry] = (answer.frames[-1] if stream else answer.json)["trace"]["sequences"]
        return [event for event in entry["events"] if event["kind"] == "pinned"]

    def count() -> float:
        text = demo.get("/metrics").body.decode()
        return float(text.partition("\nasyncllm_pins_total ")[2].partition("\n")[0])

    before = count()
    assert pinned() == pinned(cache_ttl_s=0) == []
    for ends in ({}, {"stop": "e", "max_tokens": 50}):
        [event] = pinned(cache_ttl_s=0.5, **ends)
        assert event["ttl_ms"] == 500
        assert event["pages"] > 1
    assert count() == before + 2


def test_requests_of_thousands_of_sequences_are_forgotten_sooner() -> None:
    log, requests = RequestLog(), []
    for i in range(20):
        served = Served(range(5000 * i, 5000 * (i + 1)))
        log.add("", (f"request-{i}",), served)
        log.ended(served)
        requests.append(served)
    assert len(log) == MOST_SEQUENCES // 5000
    assert log.find("", "request-19") is requests[-1]
    assert log.find("", "request-0") is log.find_sequence(7) is None
    assert len(log.names()) <= MOST_SEQUENCES
