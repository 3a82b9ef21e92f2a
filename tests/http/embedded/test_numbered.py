"""One of several replicas without sockets: what it says of itself in its answers."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.arrivals.routed import LAST_WORDS_HEADER, LOST
from asyncllm.server.embedded.exchange import InProcess, ask
from tests.support.server.fake_llm import FakeLLM


async def post(server: InProcess, path: str, body: dict[str, Any]) -> tuple[dict[str, str], bytes]:
    """The headers and the body of an answer."""

    async def parts() -> AsyncIterator[bytes]:
        yield json.dumps(body).encode()

    length = str(len(json.dumps(body))).encode()
    exchange = await server.open()
    with exchange:
        headers = [(b"content-length", length)]
        status, found = await ask(exchange, b"POST", path.encode(), headers, parts())
        answer = b"".join([part async for part in exchange.body()])
    assert status == 200
    return {name.decode(): value.decode() for name, value in found}, answer


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b"\n\n"),
        ("/api/generate", b"}\n"),
    ],
)
async def test_a_stream_begins_with_its_last_words(llm: FakeLLM, path: str, end: bytes) -> None:
    body = {"model": llm.model_name, "prompt": "ab", "stream": True, "max_tokens": 2}
    if path == "/v1/messages":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    if path == "/api/generate":
        del body["max_tokens"]
    server = InProcess(llm, ServerConfig(), 3)
    headers, answer = await post(server, path, body)
    words = b64decode(headers[LAST_WORDS_HEADER.lower()])
    assert LOST.message.encode() in words
    assert words.endswith(end)
    assert words not in answer
    await server.aclose()


async def test_without_a_number_nothing_is_said(llm: FakeLLM) -> None:
    server = InProcess(llm, ServerConfig())
    headers, _ = await post(server, "/v1/completions", {"prompt": "ab", "stream": True})
    assert LAST_WORDS_HEADER.lower() not in headers
    await server.aclose()


async def test_ids_of_responses_end_with_the_number(llm: FakeLLM) -> None:
    server = InProcess(llm, ServerConfig(), 0x2A)
    _, answer = await post(server, "/v1/responses", {"input": "ab", "max_output_tokens": 16})
    assert json.loads(answer)["id"].endswith("2a")
    await server.aclose()
