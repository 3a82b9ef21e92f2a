"""Clients of the HTTP API in the engine's own process: they see what they would on a socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, NotFoundError, OpenAI

from asyncllm import LLM
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import StepError
from asyncllm.server.app import create_app
from asyncllm.server.embedded.exchange import InProcess
from asyncllm.server.embedded.httpx_transport import async_client
from asyncllm.server.http import slow_clients
from asyncllm.server.http.listener import Listener
from asyncllm.server.http.middleware import request_id
from asyncllm.supervise.listening import bind
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.polling import until, until_idle

CONFIG = ServerConfig(
    api_key=("secret",), max_body_bytes=100_000, cors_origin=("https://a.example",), strict=True
)
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
async def llm() -> AsyncIterator[FakeLLM]:
    fake = FakeLLM()
    await fake.start()
    yield fake
    fake.resume()
    assert fake.stats.running == fake.stats.waiting == fake.num_reserved == 0
    await fake.aclose()


@pytest.fixture
async def client(llm: FakeLLM) -> AsyncIterator[httpx2.AsyncClient]:
    async with async_client(InProcess(llm, ServerConfig())) as made:
        yield made


async def parts(*texts: bytes) -> AsyncIterator[bytes]:
    for text in texts:
        yield text


def completion(prompt: str = "abc", **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, **fields}).encode()


#: Requests as arguments of ``client.request``.
REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "answer": ("POST", "/v1/completions", {"content": completion()}),
    "stream": ("POST", "/v1/completions", {"content": completion(stream=True)}),
    "ollama": ("POST", "/api/generate", {"content": b'{"model": "fake", "prompt": "abc"}'}),
    "get": ("GET", "/version?a=b", {}),
    "head": ("HEAD", "/v1/models", {}),
    "quoted": ("GET", "/v1/models/no%2Fsuch%20model", {}),
    "no key": ("GET", "/v1/models", {"headers": {"Authorization": "Bearer wrong"}}),
    "no route": ("GET", "/nothing", {}),
    "method": ("PUT", "/v1/completions", {}),
    "bad JSON": ("POST", "/v1/completions", {"content": b'{"prompt'}),
    "unknown field": ("POST", "/v1/completions", {"content": completion(such_field=1)}),
    "too large": ("POST", "/v1/completions", {"content": b"x" * 2_000_000}),
    "too large in parts": ("POST", "/v1/completions", {"content": [b"x" * 50_000] * 40}),
    "in parts": ("POST", "/v1/completions", {"content": [completion()[:9], completion()[9:]]}),
    "zipped": (
        "POST",
        "/v1/completions",
        {"content": gzip.compress(completion()), "headers": {"Content-Encoding": "gzip"}},
    ),
    "too many headers": ("GET", "/version", {"headers": {f"x-{i}": "1" for i in range(120)}}),
    "long header": ("GET", "/version", {"headers": {"x-long": "x" * 9000}}),
    "preflight": (
        "OPTIONS",
        "/v1/completions",
        {"headers": {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_answer_is_that_of_a_socket(llm: FakeLLM, name: str) -> None:
    listener = Listener(create_app(llm, CONFIG), request_seconds=10, close_seconds=0.5)
    await listener.start(bind("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listener.address[1]}"
    try:
        async with httpx2.AsyncClient(base_url=base, trust_env=False) as remote:
            expected = await _normal(remote, *REQUESTS[name])
        async with async_client(InProcess(llm, CONFIG)) as embedded:
            assert await _normal(embedded, *REQUESTS[name]) == expected
    finally:
        await listener.aclose()


async def _normal(
    client: httpx2.AsyncClient, method: str, path: str, options: dict[str, Any]
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body, without what differs from request to request."""
    options = dict(options)
    if isinstance(content := options.get("content"), list):
        options["content"] = parts(*content)
    options["headers"] = {**KEY, "X-Request-Id": "mine", **options.get("headers", {})}
    answer = await client.request(method, path, **options)
    headers = dict(answer.headers)
    # Each request has a connection of its own here.
    for differs in ("date", "connection", "x-request-id"):
        headers.pop(differs, None)
    text = re.sub(r'"(id|created|created_at|\w+_duration)":[^,}]+', r'"\1":0', answer.text)
    return answer.status_code, headers, text


async def test_the_official_clients_of_openai_and_anthropic(
    llm: FakeLLM, client: httpx2.AsyncClient
) -> None:
    openai = AsyncOpenAI(api_key="none", http_client=client)
    messages: Any = [{"role": "user", "content": "abc"}]
    answer = await openai.chat.completions.create(model="fake", messages=messages)
    stream = await openai.chat.completions.create(model="fake", messages=messages, stream=True)
    text = "".join([event.choices[0].delta.content or "" async for event in stream])
    assert answer.choices[0].message.content == text == "user: abc\nassistant: "
    with pytest.raises(NotFoundError, match="does not exist"):
        await openai.chat.completions.create(model="other", messages=messages)
    anthropic = AsyncAnthropic(api_key="none", http_client=client)
    message: Any = await anthropic.messages.create(model="fake", max_tokens=99, messages=messages)
    assert message.content[0].text == text


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_cancels_its_request(
    llm: FakeLLM, client: httpx2.AsyncClient, streamed: bool
) -> None:
    llm.hold()
    body = completion(stream=streamed)
    asking = asyncio.create_task(client.post("/v1/completions", content=body))
    await until(lambda: llm.stats.waiting == 1)
    asking.cancel()
    await until_idle(llm)
    assert len(llm.aborted) == 1


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_closed_stream_cancels_its_request(
    llm: FakeLLM, client: httpx2.AsyncClient, is_read: bool
) -> None:
    body = completion(stream=True, max_tokens=3000, ignore_eos=True)
    async with client.stream("POST", "/v1/completions", content=body) as answer:
        if is_read:
            await anext(answer.aiter_lines())
        llm.hold()
    await until_idle(llm)
    assert len(llm.aborted) == 1


async def test_events_arrive_one_by_one(llm: FakeLLM, client: httpx2.AsyncClient) -> None:
    body = completion("ab", stream=True)
    async with client.stream("POST", "/v1/completions", content=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert [json.loads(line[6:])["choices"][0]["text"] for line in lines[:2]] == ["a", "b"]
    assert lines[-1] == "data: [DONE]"


async def test_a_slow_reader_gets_merged_events_and_the_whole_text(
    llm: FakeLLM, client: httpx2.AsyncClient
) -> None:
    body = completion("ab", stream=True, max_tokens=3000, ignore_eos=True)
    async with client.stream("POST", "/v1/completions", content=body) as answer:
        await until(lambda: llm.stats.generation_tokens == 3000)
        lines = [line async for line in answer.aiter_lines() if line]
    events = [json.loads(line[6:]) for line in lines[:-1]]
    assert len(events) < 1000
    assert "".join(event["choices"][0]["text"] for event in events) == "ab" * 1500


async def test_a_client_that_does_not_read_is_cut_off(
    llm: FakeLLM, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncllm.server.streaming.sse.GIVE_UP_BYTES", slow_clients.MERGE_BYTES + 1)
    body = completion("ab", stream=True, max_tokens=3000, ignore_eos=True)
    async with client.stream("POST", "/v1/completions", content=body) as answer:
        await until(lambda: llm.stats.generation_tokens and not llm.stats.running)
        with pytest.raises(httpx2.RemoteProtocolError):
            await answer.aread()


async def test_a_stream_that_fails_ends_with_an_error(
    llm: FakeLLM, client: httpx2.AsyncClient
) -> None:
    llm.fail = StepError("planted")
    answer = await client.post("/v1/completions", content=completion(stream=True))
    assert '"message":"planted"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_the_read_timeout_holds(llm: FakeLLM, client: httpx2.AsyncClient) -> None:
    llm.hold()
    for stream in (True, False):
        body = completion(stream=stream)
        with pytest.raises(httpx2.ReadTimeout):
            await client.post("/v1/completions", content=body, timeout=0.05)
        await until_idle(llm)


async def test_the_callers_context_is_not_the_handlers(
    llm: FakeLLM, client: httpx2.AsyncClient
) -> None:
    request_id.set("of-the-caller")
    answer = await client.get("/version")
    assert answer.headers["X-Request-Id"] != "of-the-caller"


async def test_a_request_that_is_not_http(client: httpx2.AsyncClient) -> None:
    with pytest.raises(httpx2.LocalProtocolError):
        await client.get("/version", headers={"x-bad": "a\r\nb: c"})


async def test_closing_ends_requests(llm: FakeLLM) -> None:
    llm.hold()
    client = async_client(InProcess(llm, ServerConfig()))
    asking = asyncio.create_task(client.post("/v1/completions", content=completion()))
    await until(lambda: llm.stats.waiting == 1)
    await client.aclose()
    with pytest.raises(httpx2.RemoteProtocolError):
        await asking
    await until_idle(llm)


QUESTION: Any = [{"role": "user", "content": "What is 27 + 45?"}]


def test_the_synchronous_client() -> None:
    llm = LLM(device="cpu", cpu_threads=1)
    with llm.httpx_client(ServerConfig(api_key=("secret",))) as client:
        assert client.get("/v1/models").status_code == 401
    client = llm.httpx_client()
    openai = OpenAI(api_key="none", http_client=client)
    ask: Callable[..., Any] = openai.chat.completions.create
    answer = ask(model="asyncllm-demo", messages=QUESTION)
    assert answer.choices[0].message.content == "27 + 45 = 72"
    events = list(ask(model="asyncllm-demo", messages=QUESTION, stream=True))
    assert len(events) > 5
    assert "".join(e.choices[0].delta.content or "" for e in events) == "27 + 45 = 72"
    stream = ask(model="asyncllm-demo", messages=QUESTION, stream=True, max_tokens=1000)
    next(stream)
    stream.close()
    body = completion("a", stream=True, max_tokens=1000, ignore_eos=True)
    with client.stream("POST", "/v1/completions", content=body) as answer:
        assert answer.status_code == 200  # and nothing is read
    end = time.monotonic() + 10
    while llm.stats.running:
        assert time.monotonic() < end, "it was not cancelled"
        time.sleep(0.005)
    assert llm.stats.generation_tokens < 500
    with pytest.raises(httpx2.LocalProtocolError):
        client.get("/version", headers={"x-bad": "a\r\nb: c"})
    llm.close()
    with pytest.raises(httpx2.ConnectError, match="closed already"):
        client.get("/ready")
    client.close()


async def test_the_read_timeout_of_an_upload(llm: FakeLLM, client: httpx2.AsyncClient) -> None:
    """A client that never sends the rest of its body is not waited for by itself."""

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    with pytest.raises(httpx2.ReadTimeout):
        await client.post("/v1/completions", content=endless(), timeout=0.05)
