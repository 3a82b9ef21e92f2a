"""Whatever a client sends, it gets an answer or a 4xx, and the server goes on."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncllm.server.protocol import ChatRequest, CompletionRequest, GenerateRequest

if TYPE_CHECKING:
    from tests.http.serving import Server

ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/generate": (GenerateRequest, {"prompt": "a"}),
}

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.sampled_from(["auto", "user", "fake", "text", "function"]),
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "include_usage", "a"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)

quick = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("path", ROUTES)
@quick
@given(data=st.data())
def test_any_fields(server: Server, path: str, data: st.DataObject) -> None:
    kind, valid = ROUTES[path]
    names = st.sampled_from([field.name for field in msgspec.structs.fields(kind)])
    body = valid | data.draw(st.dictionaries(names, VALUES, max_size=3))
    answer = server.post(path, body)
    assert answer.status in (200, 400, 404), answer.body
    if answer.status != 200:
        assert answer.json["error"]["message"]


@quick
@given(body=st.binary(max_size=200))
def test_any_bytes(server: Server, body: bytes) -> None:
    assert server.post("/v1/completions", body).status == 400


@quick
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30))
def test_any_text_comes_back_whole(server: Server, text: str) -> None:
    body = {"prompt": text, "max_tokens": 1000, "stream": True}
    frames = server.post("/v1/completions", body).frames
    assert "".join(frame["choices"][0]["text"] for frame in frames) == text


@pytest.mark.parametrize(
    "line",
    [
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%ff/%00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"garbage\r\n\r\n",
    ],
)
def test_odd_requests(server: Server, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(line)
        status = int(client.recv(65536).split()[1])
    assert status in (200, 400, 404, 405, 413)
    assert json.loads(server.get("/health").body)
