"""Client: against a scripted server, and against our own with a fake engine."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import operator
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from pytest_aiohttp import AiohttpServer

from asyncllm import Client, SamplingParams
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import (
    AsyncLLMError,
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    NotFound,
    NotReady,
    QueueFull,
    StepError,
    TooLarge,
    Unauthorized,
)
from asyncllm.llm.client.answers import EventDecoder
from asyncllm.types import FinishReason, SchedulingParams, TokenDelta, TokenLogprob, Usage
from tests.support.server.echo_llm import EchoLLM, echo_class
from tests.support.server.serving import Server, serving

WHOLE = {
    "choices": [{"text": "hi", "token_ids": [7, 8], "finish_reason": "stop", "stop_reason": "!"}],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
}


class Script:
    """A server that answers what the test says and keeps what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, Any]] = []
        self.headers: Any = None
        self.status = 200
        self.answer: bytes | list[bytes] = json.dumps(WHOLE).encode()
        self.answer_headers: dict[str, str] = {}
        self.arrived = asyncio.Semaphore(0)
        self.hold = asyncio.Event()
        self.hold.set()
        self.gone = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.headers = request.headers
        self.asked.append((request.path, await request.json() if request.can_read_body else None))
        self.arrived.release()
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 100}, {"id": "n"}]})
        if request.path == "/tokenize":
            return web.json_response({"count": 30})
        if isinstance(self.answer, bytes):
            body = self.answer
            return web.Response(status=self.status, body=body, headers=self.answer_headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for chunk in self.answer:
                await response.write(chunk)
            await self.hold.wait()
        except asyncio.CancelledError:
            self.gone.set()
            raise
        return response

    @property
    def body(self) -> dict[str, Any]:
        """The last body, less what every request has."""
        body = dict(self.asked[-1][1])
        assert body.pop("return_token_ids") is True
        return body


@pytest.fixture
async def script(aiohttp_server: AiohttpServer) -> Script:
    script = Script()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.handle)
    server = await aiohttp_server(app, access_log=None, shutdown_timeout=0.1)
    script.url = str(server.make_url("")).removesuffix("/")
    return script


@pytest.fixture
async def client(script: Script) -> AsyncIterator[Client]:
    async with Client(script.url, model="m") as client:
        yield client


def sse(*frames: Any, end: str = "\n\n") -> bytes:
    return "".join(f"data: {json.dumps(frame)}{end}" for frame in frames).encode()


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None, **fields}]}


# -- what is asked ---------------------------------------------------------------------------------


async def test_each_form_of_prompt_has_its_route(script: Script, client: Client) -> None:
    await client.generate("hello")
    assert script.asked[-1][0] == "/v1/completions"
    assert script.body == {"model": "m", "prompt": "hello"}
    await client.generate([1, 2])
    assert script.asked[-1][0] == "/v1/completions"
    assert script.body == {"model": "m", "prompt": [1, 2]}
    messages = [{"role": "user", "content": "hello"}]
    await client.generate(messages)
    assert script.asked[-1][0] == "/v1/chat/completions"
    assert script.body == {"model": "m", "messages": messages}
    with pytest.raises(BadRequest, match="a prompt is"):
        await client.generate([1, "a"])  # type: ignore[arg-type]


async def test_params_are_sent_in_full(script: Script, client: Client) -> None:
    params = SamplingParams(max_tokens=5, stop=("\n",), stop_token_ids=(4,), seed=1, logprobs=3)
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 5,
        "min_tokens": 0,
        "stop": ["\n"],
        "stop_token_ids": [4],
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "seed": 1,
    }
    fields["return_tokens_as_token_ids"] = True
    await client.generate("hello", params)
    assert script.body == {"model": "m", "prompt": "hello", **fields, "logprobs": 3}
    await client.generate([{"role": "user", "content": "x"}], params)
    body = script.body
    assert (body["logprobs"], body["top_logprobs"]) == (True, 3)


async def test_scheduling_is_sent_where_it_is_not_the_default(
    script: Script, client: Client
) -> None:
    await client.generate("hello", None, SchedulingParams())
    assert script.body == {"model": "m", "prompt": "hello"}
    wanted = SchedulingParams(priority=-2, deadline_ms=1500, cache_salt="mine", cache_ttl_s=0)
    fields = {"priority": -2, "deadline_ms": 1500, "cache_salt": "mine", "cache_ttl_s": 0}
    await client.generate("hello", scheduling=wanted)
    assert script.body == {"model": "m", "prompt": "hello", **fields}
    script.answer = [sse(choice(delta={}, finish_reason="stop"))]
    messages = [{"role": "user", "content": "hello"}]
    assert len([delta async for delta in client.stream(messages, scheduling=wanted)]) == 1
    body = script.body
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert {name: body[name] for name in fields} == fields
    with pytest.raises(BadRequest, match="API keys"):
        await client.generate("hello", scheduling=SchedulingParams(tenant="me"))


async def test_no_limit_is_the_room_in_the_context(script: Script, client: Client) -> None:
    await client.generate([1] * 20, SamplingParams())
    assert script.body["max_tokens"] == 80
    await client.generate("hello", SamplingParams())
    assert script.asked[-2] == ("/tokenize", {"model": "m", "prompt": "hello"})
    assert script.body["max_tokens"] == 70
    await client.generate([1] * 200, SamplingParams())
    assert script.body["max_tokens"] == 1  # for the server to refuse
    await client.generate([{"role": "user", "content": "x"}], SamplingParams())
    assert script.body["max_tokens"] is None
    assert [path for path, _ in script.asked].count("/v1/models") == 1


async def test_the_model_is_asked_for_once(script: Script) -> None:
    async with Client(script.url + "/v1/", api_key="secret") as client:
        await asyncio.gather(*(client.generate("a") for _ in range(5)))
    assert [path for path, _ in script.asked].count("/v1/models") == 1
    assert script.body["model"] == "m"
    assert script.headers["Authorization"] == "Bearer secret"
    async with Client(script.url, model="other") as client:
        with pytest.raises(NotFound, match="other"):
            await client.generate("a", SamplingParams())


# -- what comes back -------------------------------------------------------------------------------


async def test_a_whole_answer(client: Client) -> None:
    answer = await client.generate("hello")
    assert answer.text == "hi"
    assert answer.token_ids == [7, 8]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "!")
    assert answer.logprobs is None
    assert answer.usage == Usage(3, 2, cached_tokens=1)


FRAMES = [
    choice(delta={"role": "assistant", "content": ""}),
    choice(delta={"content": "Grü"}, token_ids=[1, 2]),
    choice(delta={"content": ""}, token_ids=[3]),
    choice(delta={"content": "ße\n"}, token_ids=[4]),
    choice(delta={}, finish_reason="length"),
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    },
    {"choices": [], "trace": {"sequences": []}},
]
DELTAS = [
    TokenDelta("Grü", [1, 2]),
    TokenDelta("", [3]),
    TokenDelta("ße\n", [4]),
    TokenDelta(finish_reason=FinishReason.LENGTH, cached_tokens=1),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100_000])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\n: ping\n\nevent: x\n\n"])
async def test_a_stream_in_chunks_of_any_size(
    script: Script, client: Client, size: int, end: str
) -> None:
    data = b": hello\n\n" + sse(*FRAMES, end=end) + b"data: [DONE]" + end.encode()
    script.answer = [data[i : i + size] for i in range(0, len(data), size)]
    deltas = [delta async for delta in client.stream([{"role": "user", "content": "x"}])]
    assert deltas == DELTAS


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_cut_in_three_anywhere(end: bytes) -> None:
    data = b"data: one" + end + b": ping" + end + b"data:two\ndata: lines" + end + b"data: x"
    for i, j in itertools.combinations_with_replacement(range(len(data) + 1), 2):
        decoder = EventDecoder()
        parts = [decoder.feed(part) for part in (data[:i], data[i:j], data[j:])]
        assert functools.reduce(operator.iadd, parts, []) == [b"one", b"two\nlines"]


async def test_logprobs_of_both_routes(script: Script, client: Client) -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    chat = choice(message={"content": "ab"}, token_ids=[5, 6], finish_reason="stop")
    chat["choices"][0]["logprobs"] = {"content": [entry, {**entry, "logprob": -9999.0}]}
    script.answer = json.dumps(chat).encode()
    answer = await client.generate([{"role": "user", "content": "x"}])
    assert answer.logprobs == [TokenLogprob(5, -0.5), TokenLogprob(6, -9999.0)]
    # Servers that do not know of ids tell texts all the same.
    entry["top_logprobs"] = [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    script.answer = json.dumps(chat).encode()
    answer = await client.generate([{"role": "user", "content": "x"}], SamplingParams(logprobs=1))
    assert answer.logprobs == [TokenLogprob(5, -0.5), TokenLogprob(6, -9999.0)]
    lists = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.0], "top_logprobs": [{}, {}]}
    plain = choice(text="ab", token_ids=[5, 6], finish_reason="stop", logprobs=lists)
    script.answer = json.dumps(plain).encode()
    assert (await client.generate("x")).logprobs == [TokenLogprob(5, -0.5), TokenLogprob(6, -1.0)]


async def test_a_server_that_knows_no_token_ids(script: Script, client: Client) -> None:
    script.answer = json.dumps(choice(message={"content": None}, finish_reason="stop")).encode()
    answer = await client.generate([{"role": "user", "content": "x"}])
    assert (answer.text, answer.token_ids, answer.usage) == ("", [], Usage(0, 0))


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "context_length_exceeded", BadRequest),
        (401, "invalid_api_key", Unauthorized),
        (403, None, Unauthorized),
        (404, "model_not_found", NotFound),
        (408, "deadline_exceeded", DeadlineExceeded),
        (408, None, AsyncLLMError),
        (413, None, TooLarge),
        (422, None, BadRequest),
        (429, "queue_full", QueueFull),
        (429, None, QueueFull),
        (500, None, AsyncLLMError),
        (503, "not_ready", NotReady),
        (503, "engine_dead", EngineDead),
        (503, None, NotReady),
    ],
)
async def test_an_error_has_the_class_it_had_at_the_server(
    script: Script, client: Client, status: int, code: str | None, kind: type[AsyncLLMError]
) -> None:
    script.status = status
    error = {"message": "it is so", "type": "x", "param": "prompt", "code": code}
    script.answer = json.dumps({"error": error}).encode()
    script.answer_headers = {"Retry-After": "7"}
    with pytest.raises(AsyncLLMError, match="it is so") as caught:
        await client.generate("a")
    assert type(caught.value) is kind
    if isinstance(caught.value, QueueFull):
        assert caught.value.retry_after == 7
    else:
        assert caught.value.param == "prompt"
        assert caught.value.code == (code or kind.code)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "3", "retry-after-ms": "2500"}, 2.5),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        ({}, 1.0),
    ],
)
async def test_when_to_try_again(
    script: Script, client: Client, headers: dict[str, str], seconds: float
) -> None:
    script.status, script.answer_headers = 429, headers
    with pytest.raises(QueueFull) as caught:
        await client.generate("a")
    assert caught.value.retry_after == seconds


@pytest.mark.parametrize("answer", [b"<h1>Bad Gateway</h1>", b"", b'{"error": "no"}', b"[]"])
async def test_an_error_page_of_a_proxy(script: Script, client: Client, answer: bytes) -> None:
    script.status, script.answer = 502, answer
    with pytest.raises(AsyncLLMError, match="HTTP status 502"):
        await client.generate("a")


@pytest.mark.parametrize("answer", [b"hello", b'{"choices": 5}', b"{}", b'{"choices": [{}]}'])
async def test_an_answer_that_is_none(script: Script, client: Client, answer: bytes) -> None:
    script.answer = answer
    with pytest.raises(AsyncLLMError, match="server"):
        await client.generate("a")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "dead", "type": "server_error", "code": "engine_dead"}, EngineDead),
        ({"message": "step", "type": "server_error", "code": None}, AsyncLLMError),
        ({"message": "bad", "type": "invalid_request_error", "code": None}, BadRequest),
        ({"message": "full", "type": "rate_limit_error", "code": "queue_full"}, QueueFull),
        (
            {"message": "late", "type": "timeout_error", "code": "deadline_exceeded"},
            DeadlineExceeded,
        ),
        ({"message": "bad", "type": "BadRequestError", "code": 400}, BadRequest),
    ],
)
async def test_an_error_in_mid_stream(
    script: Script, client: Client, error: dict[str, Any], kind: type[AsyncLLMError]
) -> None:
    script.answer = [sse(choice(text="a"), {"error": error}) + b"data: [DONE]\n\n"]
    deltas = client.stream("a")
    assert (await anext(deltas)).text == "a"
    with pytest.raises(AsyncLLMError, match=error["message"]) as caught:
        await anext(deltas)
    assert type(caught.value) is kind


async def test_a_stream_that_breaks_off(script: Script, client: Client) -> None:
    script.answer = [sse(choice(text="a"))]
    deltas = client.stream("a")
    assert (await anext(deltas)).text == "a"
    with pytest.raises(ConnectionError, match="broke off"):
        await anext(deltas)


async def test_nobody_listens() -> None:
    async with Client("http://127.0.0.1:9", model="m") as client:
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
            await client.generate("a")
    with pytest.raises(BadRequest, match="http://"):
        Client("localhost:8000")


async def test_a_server_that_says_nothing(script: Script) -> None:
    script.answer = []
    script.hold.clear()
    async with Client(script.url, model="m", timeout=0.2) as client:
        with pytest.raises(TimeoutError, match="no answer in time"):
            await client.generate("a")


# -- the connection --------------------------------------------------------------------------------


async def test_leaving_a_stream_closes_the_connection(script: Script, client: Client) -> None:
    script.answer = [sse(choice(text="a"))]
    script.hold.clear()
    deltas = client.stream("a")
    assert (await anext(deltas)).text == "a"
    await deltas.aclose()
    await asyncio.wait_for(script.gone.wait(), 3)


@pytest.mark.parametrize("call", [Client.generate, lambda c, p: anext(c.stream(p))])
async def test_cancelling_closes_the_connection(
    script: Script, client: Client, call: Callable[[Client, str], Any]
) -> None:
    script.answer = []
    script.hold.clear()
    task = asyncio.ensure_future(call(client, "a"))
    await script.arrived.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(script.gone.wait(), 3)


async def test_connections_are_used_again_and_not_limited(script: Script, client: Client) -> None:
    script.answer = [sse(choice(text="a", finish_reason="stop")), b"data: [DONE]\n\n"]
    script.hold.clear()

    async def read() -> None:
        assert [d.text async for d in client.stream("a")] == ["a"]

    tasks = [asyncio.ensure_future(read()) for _ in range(150)]
    for _ in tasks:
        await script.arrived.acquire()
    script.hold.set()
    await asyncio.gather(*tasks)
    session = client._session
    assert session is not None
    assert session.connector is not None
    idle = sum(len(connections) for connections in session.connector._conns.values())
    assert idle == len(tasks)


# -- our own server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(echo_class(), ServerConfig(api_key=("key",))) as server:
        yield server
        server.until_idle()


PROMPTS = ["Grüße", [104, 105], [{"role": "user", "content": "hi"}]]
PARAMS = [
    SamplingParams(),
    SamplingParams(max_tokens=2),
    SamplingParams(stop=("i",)),
    SamplingParams(logprobs=0),
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_answers_equal_those_of_the_engine(
    server: Server, prompt: Any, params: SamplingParams
) -> None:
    async with echo_class()() as engine:
        expected = await engine.generate(prompt, params)
    server.call(lambda: setattr(server.llm, "cached", 1))
    expected.usage = Usage(expected.usage.prompt_tokens, expected.usage.completion_tokens, 1)
    async with Client(server.url, api_key="key") as client:
        assert await client.generate(prompt, params) == expected
        whole = TokenDelta()
        async for delta in client.stream(prompt, params):
            whole.merge(delta)
    assert whole == TokenDelta(
        expected.text,
        expected.token_ids,
        expected.logprobs,
        expected.finish_reason,
        expected.stop_reason,
        cached_tokens=1,
    )


async def test_errors_of_our_server(server: Server) -> None:
    async with Client(server.url, api_key="wrong", model="fake") as client:
        with pytest.raises(Unauthorized):
            await client.generate("a")
    async with Client(server.url, api_key="key") as client:
        with pytest.raises(BadRequest) as caught:
            await client.generate("a" * 5000, SamplingParams())
        assert caught.value.code == "context_length_exceeded"
        engine = server.llm
        assert isinstance(engine, EchoLLM)
        engine.fail = StepError("it broke")
        with pytest.raises(AsyncLLMError, match="it broke"):
            await client.generate("a")
        with pytest.raises(AsyncLLMError, match="it broke"):
            await anext(client.stream("a"))
        engine.fail = None
