"""A full queue refuses requests before their text is tokenized, however many come at once."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server.serving import Server

PLACES = 4
USER: Any = {"role": "user", "content": "a"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/chat/completions/render": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/generate": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/api/chat": {"model": "fake", "messages": [USER], "stream": False},
    "/api/generate": {"model": "fake", "prompt": "a", "stream": False},
    "/api/embed": {"model": "fake", "input": "a"},
}


class SlowTokenizing(FakeLLM):
    """Tokenizes when it may, as a thread would that has much to do."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = msgspec.structs.replace(self.limits, max_waiting=PLACES)
        self.may_encode = asyncio.Event()

    async def encode_all(self, texts: list[str], **options: Any) -> list[list[int]]:
        ids = await super().encode_all(texts, **options)
        await self.may_encode.wait()
        return ids


@pytest.fixture
def slow() -> Iterator[Server]:
    with serving(SlowTokenizing) as server:
        yield server
        server.call(server.llm.may_encode.set)  # type: ignore[attr-defined]
        server.until_idle()


def num_encoded(server: Server) -> int:
    return server.call(lambda: len(server.llm.encoded))


@pytest.mark.parametrize("path", ROUTES)
def test_a_refused_prompt_is_not_tokenized(slow: Server, path: str) -> None:
    full = 503 if path.startswith("/api/") else 429  # Ollama's own
    with ThreadPoolExecutor(3 * PLACES) as threads:
        asked = [threads.submit(slow.post, path, ROUTES[path]) for _ in range(3 * PLACES)]
        slow.until(lambda: sum(each.done() for each in asked) == 2 * PLACES)
        assert num_encoded(slow) == PLACES
        assert {each.result().status for each in asked if each.done()} == {full}
        metrics = slow.get("/metrics").body.decode()
        assert f"asyncllm_requests_reserved {PLACES}.0" in metrics
        assert "asyncllm_requests_waiting 0.0" in metrics
        slow.call(slow.llm.may_encode.set)  # type: ignore[attr-defined]
        statuses = sorted(each.result().status for each in asked)
    assert statuses == [200] * PLACES + [full] * 2 * PLACES
    slow.until_idle()
    assert slow.post(path, ROUTES[path]).status == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["a", "b", "c"]}),
        ("/v1/completions", {"prompt": "a", "n": 3}),
        ("/v1/chat/completions", {"messages": [USER], "n": 3}),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}),
    ],
    ids=str,
)
def test_each_sequence_takes_a_place(slow: Server, path: str, fields: dict[str, Any]) -> None:
    with slow.open(path, fields):
        slow.until(lambda: slow.llm.num_reserved == 3)
        assert slow.post("/v1/completions", {"prompt": "x", "n": 2}).status == 429
        with slow.open("/v1/completions", {"prompt": "x"}):
            slow.until(lambda: slow.llm.num_reserved == 4)
            assert slow.post("/v1/completions", {"prompt": "x"}).status == 429


def test_clients_that_leave_free_their_places(slow: Server) -> None:
    clients = [slow.open("/v1/completions", {"prompt": "a"}) for _ in range(PLACES)]
    slow.until(lambda: slow.llm.num_reserved == PLACES)
    for client in clients:
        client.close()
    slow.until(lambda: slow.llm.num_reserved == 0)


@pytest.mark.parametrize(
    "body", [b"{", b'{"prompt": 1}', b'{"prompt": ""}', b'{"prompt": "a", "model": "none"}']
)
def test_refused_requests_free_their_places(slow: Server, body: bytes) -> None:
    for _ in range(2 * PLACES):
        assert slow.post("/v1/completions", body).status in (400, 404)
    assert slow.call(lambda: slow.llm.num_reserved) == 0


def test_a_body_that_has_not_arrived_has_no_place(slow: Server) -> None:
    with socket.create_connection(("127.0.0.1", slow.port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{")
        for _ in range(3):  # whoever asks now is answered after what was sent before
            assert slow.get("/health").status == 200
        assert slow.call(lambda: slow.llm.num_reserved) == 0
        half.sendall(b'"prompt": "a"}')
        slow.until(lambda: slow.llm.num_reserved == 1)


def test_beams_take_one_place_for_each_search(slow: Server) -> None:
    beams = {"prompt": ["a", "b"], "n": 2, "use_beam_search": True, "temperature": 0}
    with slow.open("/v1/completions", beams) as client:
        slow.until(lambda: slow.llm.num_reserved == 4)
        slow.call(slow.llm.hold)
        slow.call(slow.llm.may_encode.set)  # type: ignore[attr-defined]
        slow.until(lambda: slow.llm.stats.waiting == 2)
        assert slow.call(lambda: slow.llm.num_reserved) == 0
        slow.call(slow.llm.resume)
        assert b" 200 " in client.recv(100)
