"""Ending a request by its id: its client gets what there is, and nobody else notices."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.config.server_config import ServerConfig
from tests.support.server.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGES = [{"role": "user", "content": "abc"}]
MINE = {"X-Request-Id": "mine"}


@pytest.fixture
def held(server: Server) -> Iterator[Server]:
    """A server whose engine makes no step."""
    server.call(server.llm.hold)
    yield server
    server.call(server.llm.resume)


@pytest.mark.parametrize("stream", [True, False])
def test_the_client_gets_the_answer_so_far(held: Server, stream: bool) -> None:
    body = {"messages": MESSAGES, "stream": stream, "n": 2}
    before = len(held.llm.params)
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(held.post, "/v1/chat/completions", body, MINE)
        other = threads.submit(held.post, "/v1/chat/completions", {"messages": MESSAGES})
        held.until(lambda: len(held.llm.params) == before + 3)
        aborted = held.post("/v1/requests/mine/abort", {})
        answer = asking.result()
        held.call(held.llm.resume)
        assert other.result().json["choices"][0]["finish_reason"] == "stop"
    assert aborted.json == {"id": "mine", "aborted": True}
    assert answer.status == 200
    assert _ends(answer.frames if stream else [answer.json]) == ["abort", "abort"]
    assert held.post("/v1/requests/mine/abort", {}).status == 404


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_beam_search(held: Server, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "prompt": ["abc", "def"]}
    body |= {"use_beam_search": True, "n": 2}
    count = 1 if "chat" in path else 2
    before = len(held.llm.params)
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(held.post, path, {**body, "stream": stream}, MINE)
        held.until(lambda: len(held.llm.params) == before + count)
        assert held.post("/v1/requests/mine/abort", {}).status == 200
        answer = asking.result()
    assert _ends(answer.frames if stream else [answer.json]) == ["abort"] * 2 * count
    held.until(lambda: len(held.llm.aborted) >= count)
    assert held.llm.stats.running == held.llm.stats.waiting == 0
    assert held.post("/v1/requests/mine/abort", {}).status == 404


ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "chatcmpl-": ("/v1/chat/completions", {"messages": MESSAGES}),
    "cmpl-": ("/v1/completions", {"prompt": "abc", "echo": True}),
    "msg_": ("/v1/messages", {"model": "fake", "max_tokens": 9, "messages": MESSAGES}),
    "resp_": ("/v1/responses", {"input": "abc"}),
}


@pytest.mark.parametrize("prefix", ANSWERS)
def test_by_the_id_that_a_stream_begins_with(held: Server, prefix: str) -> None:
    path, body = ANSWERS[prefix]
    with held.open(path, {**body, "stream": True}, version="1.0") as client:
        stream = client.makefile("rb")
        beginning = next(line for line in stream if line.startswith(b"data: "))
        match = re.search(rf'"id":"({prefix}[^"]+)"', beginning.decode())
        assert match, beginning
        aborted = held.post(f"/v1/requests/{match[1]}/abort", {})
        assert aborted.json == {"id": match[1], "aborted": True}
        assert re.search(b'"(abort|pause_turn|cancelled)"', stream.read())
    assert held.post(f"/v1/requests/{match[1]}/abort", {}).status == 404


def test_a_response_in_the_background(held: Server) -> None:
    response = held.post("/v1/responses", {"input": "abc", "background": True}).json
    assert held.post(f"/v1/requests/{response['id']}/abort", {}).status == 200
    assert held.get(f"/v1/responses/{response['id']}").json["status"] == "cancelled"


def test_an_unknown_id(held: Server) -> None:
    answer = held.post("/v1/requests/nobody/abort", {})
    assert answer.status == 404
    assert answer.json["error"]["param"] == "id"


def test_only_the_tenants_own() -> None:
    with serving(config=ServerConfig(api_key=("a", "b"))) as server:
        server.call(server.llm.hold)
        mine, other = ({"Authorization": f"Bearer {key}"} for key in "ab")
        with ThreadPoolExecutor() as threads:
            asking = threads.submit(server.post, "/v1/completions", {"prompt": "a"}, MINE | mine)
            server.until(lambda: len(server.llm.params) == 1)
            for name in ("mine", "cmpl-mine"):
                path = f"/v1/requests/{name}/abort"
                assert server.request("POST", path, headers=other).status == 404
                assert not asking.done()
            assert server.request("POST", path, headers=mine).status == 200
            assert _ends([asking.result().json]) == ["abort"]


def _ends(frames: list[Any]) -> list[str]:
    choices = [choice for frame in frames for choice in frame["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def test_the_pages_of_a_client_that_leaves_are_soon_free(demo: Server) -> None:
    """And how soon is measured, for streams and for answers in one piece."""
    freed = demo.llm.stats.cancel_to_free
    for stream in (True, False):
        before = sum(freed.counts)
        body = {"prompt": "a b c " * 40, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
        with demo.open("/v1/completions", body):
            demo.until(lambda: demo.llm.stats.running == 1)
        demo.until_idle()
        demo.until(lambda seen=before: sum(freed.counts) == seen + 1)  # type: ignore[misc]
        demo.until(lambda: demo.llm.stats.pages_held == 0)
    assert b"asyncllm_cancel_to_free_seconds_count" in demo.get("/metrics").body
