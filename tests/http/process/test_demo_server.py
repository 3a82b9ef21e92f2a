"""The product as a user meets it: ``asyncllm serve`` in a process, real clients on a socket."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest

from asyncllm import AsyncLLM, Client, SamplingParams
from tests.support.server.serving import ServerProcess

MODEL = "asyncllm-demo"
SUM: Any = [{"role": "user", "content": "What is 27 + 45?"}]
STORY: Any = [{"role": "user", "content": "Count from 1 to 50."}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    running = ServerProcess("--cpu-threads", "1")
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as made:
        yield made


async def metrics(server: ServerProcess) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def until_idle(server: ServerProcess) -> dict[str, float]:
    """The gauges of live requests return to 0; fails when they do not within seconds."""
    names = ("requests_running", "requests_waiting", "kv_pages_held")
    for _ in range(100):
        values = await metrics(server)
        if all(values[f"asyncllm_{name}"] == 0 for name in names):
            return values
        await asyncio.sleep(0.05)
    raise AssertionError({name: values[f"asyncllm_{name}"] for name in names})


def test_the_official_client_sync(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=SUM)
    assert "72" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=SUM, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"

    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completions_take_prompts_of_every_kind(client: openai.OpenAI) -> None:
    texts = client.completions.create(
        model=MODEL, prompt=["1, 2, 3, 4,", "The days of the week are"], max_tokens=12
    )
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert texts.choices[0].text.startswith(" 5, 6")
    ids = [
        json.loads(raw)["tokens"]
        for raw in (
            post(client, "/tokenize", {"prompt": p})
            for p in ("1, 2, 3, 4,", "The days of the week are")
        )
    ]
    again = client.completions.create(model=MODEL, prompt=ids, max_tokens=12)
    assert [c.text for c in again.choices] == [c.text for c in texts.choices]
    one = client.completions.create(model=MODEL, prompt=ids[0], max_tokens=12, logprobs=2)
    assert one.choices[0].text == texts.choices[0].text
    logprobs = one.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == one.choices[0].text
    streamed = client.completions.create(model=MODEL, prompt=ids[0], max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text


def post(client: openai.OpenAI, path: str, body: dict[str, object]) -> str:
    url = str(client.base_url).removesuffix("/v1/") + path
    return client.post(url, body=body, cast_to=str)


async def test_the_official_client_async(async_client: openai.AsyncOpenAI) -> None:
    answers = await asyncio.gather(
        *(
            async_client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": f"What is {n} + 21?"}]
            )
            for n in range(30, 40)
        )
    )
    texts = [answer.choices[0].message.content or "" for answer in answers]
    right = sum(str(n + 21) in text for n, text in zip(range(30, 40), texts, strict=True))
    assert right >= 9, texts


async def test_logprobs_seed_stop_and_n(async_client: openai.AsyncOpenAI) -> None:
    create = async_client.chat.completions.create
    rich = await create(model=MODEL, messages=SUM, logprobs=True, top_logprobs=3)
    assert rich.choices[0].logprobs is not None
    entries = rich.choices[0].logprobs.content or []
    shown = [entry for entry in entries if entry.token != "<|im_end|>"]
    assert "".join(entry.token for entry in shown) == rich.choices[0].message.content
    assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in entries)

    story: Any = [{"role": "user", "content": "Tell me a story."}]
    first, second = [
        await create(model=MODEL, messages=story, temperature=1.5, max_tokens=30, seed=11, n=2)
        for _ in range(2)
    ]
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert first.choices[0].message.content != first.choices[1].message.content

    stopped = await create(model=MODEL, messages=STORY, stop=[", 7"])
    assert (stopped.choices[0].message.content or "").endswith("6")
    assert stopped.choices[0].finish_reason == "stop"


async def test_two_hundred_streams_at_once(server: ServerProcess) -> None:
    body = {"messages": STORY, "stream": True, "max_tokens": 60, "ignore_eos": True}

    async def one(session: aiohttp.ClientSession) -> tuple[str, int]:
        text, frames = "", 0
        async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    frames += 1
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        assert line == b"\n"
        return text, frames

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        answers = await asyncio.gather(*(one(session) for _ in range(200)))
    assert len({text for text, _ in answers}) == 1
    assert all(frames <= 62 for _, frames in answers), "at most one frame a step, and both ends"
    await until_idle(server)


async def test_a_client_that_goes_away_frees_its_pages(server: ServerProcess) -> None:
    aborted = (await metrics(server))['asyncllm_requests_finished_total{reason="abort"}']
    body = {"messages": STORY, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        responses = [
            await session.post(f"{server.url}/v1/chat/completions", json=body) for _ in range(3)
        ]
        for response in responses:
            await response.content.readany()
        for _ in range(500):
            if (await metrics(server))["asyncllm_requests_running"] == 3:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("they never ran together")
        for response in responses:
            response.close()
    values = await until_idle(server)
    assert values['asyncllm_requests_finished_total{reason="abort"}'] == aborted + 3


async def test_a_cut_inside_a_character_leaves_whole_ones(async_client: openai.AsyncOpenAI) -> None:
    prompt = "Repeat: 😀😁😂"
    create = async_client.completions.create
    for wanted in range(1, 24):
        whole = await create(model=MODEL, prompt=prompt, max_tokens=wanted)
        pieces = [
            chunk.choices[0].text
            async for chunk in await create(
                model=MODEL, prompt=prompt, max_tokens=wanted, stream=True
            )
        ]
        assert "".join(pieces) == whole.choices[0].text
        for piece in pieces:
            piece.encode()
            assert "\N{REPLACEMENT CHARACTER}" not in piece


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", "{", 400, None),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/chat/completions", {"messages": SUM, "model": "gpt-9"}, 404, "model"),
        ("/v1/chat/completions", {"messages": SUM, "max_tokens": -1}, 400, "max_tokens"),
        ("/v1/chat/completions", {"messages": SUM, "temperature": "hot"}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": SUM, "top_p": 7, "stream": True}, 400, "top_p"),
        ("/v1/chat/completions", {"messages": SUM, "max_tokens": 10**6}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [10**7]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x " * 50000, "stream": True}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/v1/completions", {"prompt": ["a"] * 5000}, 400, "prompt"),
        ("/v1/chat/completions", {"messages": SUM * 9000}, 400, "messages"),
        (
            "/v1/chat/completions",
            {"messages": SUM, "chat_template_kwargs": {"tools": 1}},
            400,
            "chat_template_kwargs",
        ),
        ("/v1/completions", {"prompt": "a", "top_k": 2**64}, 400, "top_k"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 2**63}, 400, "min_tokens"),
        ("/v1/nothing", {}, 404, None),
    ],
)
async def test_bad_input_is_named_and_disturbs_nobody(
    server: ServerProcess, path: str, body: object, status: int, param: str | None
) -> None:
    data = body if isinstance(body, str) else json.dumps(body)
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, data=data) as response,
    ):
        assert response.status == status
        error = (await response.json())["error"]
    assert error["param"] == param
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    await until_idle(server)


async def test_the_remote_client_answers_as_the_library_does(server: ServerProcess) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    async with AsyncLLM(device="cpu", cpu_threads=1) as llm, Client(server.url) as remote:
        for prompt in ("1, 2, 3,", SUM):
            here = await llm.generate(prompt, params)
            there = await remote.generate(prompt, params)
            assert (there.text, there.token_ids) == (here.text, here.token_ids)
            assert there.finish_reason == here.finish_reason
            assert there.usage.prompt_tokens == here.usage.prompt_tokens
            assert there.usage.completion_tokens == here.usage.completion_tokens
            streamed = [delta async for delta in remote.stream(prompt, params)]
            assert "".join(delta.text for delta in streamed) == here.text
            assert [t for delta in streamed for t in delta.token_ids] == here.token_ids


def test_sigterm_lets_streams_finish() -> None:
    server = ServerProcess("--cpu-threads", "1")
    body = json.dumps({"messages": STORY, "stream": True, "max_tokens": 300, "ignore_eos": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall((head + body).encode())
        received = connection.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        while b"[DONE]" not in received:
            more = connection.recv(65536)
            assert more, received[-300:]
            received += more
    assert b'"finish_reason":"length"' in received
    assert server.process.wait(20) == 0
    server.stop()


def test_a_port_in_use_is_reported_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = subprocess.run(
            [sys.executable, "-m", "asyncllm", "serve", "--port", port],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert run.returncode == 1
    assert port in run.stderr
