"""Prefix caching, deadlines, tenants and traces, on the demo model behind ``asyncllm serve``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from asyncllm import Client, SamplingParams
from asyncllm.errors import DeadlineExceeded
from asyncllm.types import SchedulingParams
from tests.support.server.serving import ServerProcess

SYSTEM = {"role": "system", "content": "You answer in short sentences and count carefully."}
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    keys = ("--api-key", "alpha", "--api-key", "beta")
    running = ServerProcess("--cpu-threads", "1", *keys)
    yield running
    assert running.stop() == 0


class Caller:
    """Asks the server with one key."""

    def __init__(self, server: ServerProcess, key: str):
        self._url = server.url
        self._headers = {"Authorization": f"Bearer {key}"}

    async def get(self, path: str) -> tuple[int, Any, Any]:
        """Status, headers and JSON."""
        status, headers, body = await self._fetch("GET", path)
        return status, headers, json.loads(body)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any, bytes]:
        return await self._fetch("POST", path, body)

    async def _fetch(self, method: str, path: str, body: Any = None) -> tuple[int, Any, bytes]:
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.request(method, self._url + path, json=body) as response,
        ):
            return response.status, response.headers, await response.read()

    async def chat(self, messages: list[Any], **fields: Any) -> Any:
        status, _, body = await self.post(
            "/v1/chat/completions", {"messages": messages, "temperature": 0, **fields}
        )
        assert status == 200, body
        return json.loads(body)

    async def metrics(self) -> dict[str, float]:
        _, _, body = await self._fetch("GET", "/metrics")
        lines = body.decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def until_idle(self) -> None:
        for _ in range(100):
            if (await self.metrics())["asyncllm_kv_pages_held"] == 0:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("pages are held")


@pytest.fixture
def alpha(server: ServerProcess) -> Caller:
    return Caller(server, "alpha")


@pytest.fixture
def beta(server: ServerProcess) -> Caller:
    return Caller(server, "beta")


def cached_tokens(answer: Any) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached <= answer["usage"]["prompt_tokens"]
    return cached


async def test_the_second_turn_of_a_chat_is_cached(alpha: Caller) -> None:
    first = [SYSTEM, {"role": "user", "content": "Count from 1 to 20."}]
    one = await alpha.chat(first)
    assert cached_tokens(one) == 0
    await alpha.until_idle()  # the answer's pages are cached one step after its end
    again = {"role": "user", "content": "And from 3 to 6?"}
    second = [*first, one["choices"][0]["message"], again]
    two = await alpha.chat(second)
    # All but what does not fill a page: of the prompt, and of the answer.
    assert cached_tokens(two) >= one["usage"]["total_tokens"] - 2 * 16
    assert (await alpha.chat(second))["choices"] == two["choices"]


async def test_salts_keep_apart(alpha: Caller, beta: Caller) -> None:
    messages = [SYSTEM, {"role": "user", "content": "What is 5 + 6, and why is it 11?"}]
    await alpha.chat(messages, cache_salt="one")
    assert cached_tokens(await alpha.chat(messages, cache_salt="two")) == 0
    shared = cached_tokens(await alpha.chat(messages, cache_salt="one"))
    assert shared > 0
    # A salt is what keeps apart, not a key.
    assert cached_tokens(await beta.chat(messages, cache_salt="one")) == shared


async def test_choices_of_one_prompt_count_it_once(alpha: Caller) -> None:
    messages = [SYSTEM, {"role": "user", "content": "What is 12 + 13, and why is it 25?"}]
    answer = await alpha.chat(messages, n=4, cache_salt="four")
    assert cached_tokens(answer) == 0, "nothing was cached when its first choice came"
    assert cached_tokens(await alpha.chat(messages, n=4, cache_salt="four")) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_of_a_millisecond(alpha: Caller, stream: bool) -> None:
    body = {"prompt": "Once", "deadline_ms": 1, **LONG, "stream": stream}
    status, headers, answer = await alpha.post("/v1/completions", body)
    if status == 200:  # it had begun to stream
        assert stream
        *_, error, done = answer.decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        answer = error.removeprefix("data: ").encode()
    else:
        assert status == 408
        assert headers["x-should-retry"] == "false"
    assert json.loads(answer)["error"]["code"] == "deadline_exceeded"


async def test_a_deadline_for_the_remote_client(server: ServerProcess) -> None:
    params = SamplingParams(max_tokens=1900, ignore_eos=True)
    async with Client(server.url, api_key="alpha") as client:
        # So that the server knows how long a step takes.
        await client.generate("Once", SamplingParams(max_tokens=50, ignore_eos=True))
        deltas = client.stream("Once", params, SchedulingParams(deadline_ms=150))
        with pytest.raises(DeadlineExceeded):
            [delta async for delta in deltas]
        answer = await client.generate("Once", SamplingParams(max_tokens=3))
    assert answer.usage.completion_tokens == 3


async def test_priorities_are_served_as_well_as_others(server: ServerProcess) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    async with Client(server.url, api_key="beta") as client:
        answers = await asyncio.gather(
            *(
                client.generate("1, 2, 3,", params, SchedulingParams(priority=priority))
                for priority in (10, 0, -10)
            )
        )
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_trace_is_complete(alpha: Caller, beta: Caller, stream: bool) -> None:
    body = {
        "messages": [SYSTEM, {"role": "user", "content": "Count from 1 to 9."}],
        "max_tokens": 12,
        "ignore_eos": True,
        "stream": stream,
        "trace": True,
        "n": 2,
    }
    status, headers, raw = await alpha.post("/v1/chat/completions", body)
    assert status == 200
    if stream:
        *_, last, done, _ = raw.decode().split("\n\n")
        assert done == "data: [DONE]"
        answer = json.loads(last.removeprefix("data: "))
        assert answer["choices"] == []
    else:
        answer = json.loads(raw)
    sequences = answer["trace"]["sequences"]
    assert len(sequences) == 2
    for entry in sequences:
        assert (entry["outcome"], entry["tenant"]) == ("length", "key-1")
        assert entry["completion_tokens"] == 12
        # The first token comes out of the last chunk; each step after it gives one more.
        assert entry["steps"]["count"] >= 12
        assert entry["steps"]["max_rows"] >= 1
        assert 0 <= entry["started_ms"] <= entry["first_token_ms"] <= entry["ended_ms"]
        chunks = [event for event in entry["events"] if event["kind"] == "chunk"]
        computed = sum(chunk["tokens"] for chunk in chunks)
        assert computed == entry["prompt_tokens"] - entry["cached_tokens"]

    for name in (answer["id"], headers["X-Request-Id"]):
        path = f"/v1/requests/{name}/trace"
        assert (await alpha.get(path))[2]["sequences"] == sequences
        assert (await beta.get(path))[0] == 404


async def test_a_request_that_was_refused_or_dropped_can_be_looked_up(alpha: Caller) -> None:
    body = {"prompt": "Once", "deadline_ms": 100, **LONG}
    status, headers, _ = await alpha.post("/v1/completions", body)
    assert status == 408
    status, _, trace = await alpha.get(f"/v1/requests/{headers['X-Request-Id']}/trace")
    if status == 200:  # it was not refused at once
        assert trace["sequences"][0]["outcome"] == "error"
    else:
        assert status == 404


async def test_metrics_count_what_was_cached(alpha: Caller) -> None:
    values = await alpha.metrics()
    assert values["asyncllm_cached_prompt_tokens_total"] > 0
    assert values["asyncllm_kv_pages_evicted_total"] == 0
    assert values["asyncllm_kv_host_pages_used"] == 0
