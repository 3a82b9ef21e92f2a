"""Ending a request by its id: its client gets what there is, and nobody else notices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.http.serving import Server

MESSAGES = [{"role": "user", "content": "abc"}]
MINE = {"X-Request-Id": "mine"}


@pytest.fixture
def held(server: Server) -> Iterator[Server]:
    """A server whose engine makes no step."""
    server.call(server.llm.hold)
    yield server
    server.call(server.llm.resume)


@pytest.mark.parametrize("stream", [True, False])
def test_the_client_gets_what_there_is(held: Server, stream: bool) -> None:
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


def test_only_the_tenants_own(held: Server) -> None:
    answer = held.post("/v1/requests/nobody/abort", {})
    assert answer.status == 404
    assert answer.json["error"]["param"] == "id"


def _ends(frames: list[Any]) -> list[str]:
    choices = [choice for frame in frames for choice in frame["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
