"""Scoring and beam search over HTTP with the built-in model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
from pytest_aiohttp import AiohttpClient

from asyncllm import AsyncLLM, BeamSearchParams, Client, SamplingParams
from asyncllm.types import PromptLogprob
from tests.cpu.llm.test_library import idle, until

SUM = [{"role": "user", "content": "What is 27 + 45?"}]
TEXT = "1, 2, 3, 4,"
BEAMS: dict[str, Any] = {"use_beam_search": True, "best_of": 4, "n": 2, "max_tokens": 12}


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(device="cpu", cpu_threads=1, dtype="float32") as running:
        yield running
        await idle(running)


@pytest.fixture
async def client(llm: AsyncLLM, aiohttp_client: AiohttpClient) -> Any:
    return await aiohttp_client(llm.aiohttp_app())


async def post(client: Any, path: str, body: dict[str, Any]) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status == 200, await reply.text()
    return await reply.json()


async def frames(client: Any, path: str, body: dict[str, Any]) -> list[Any]:
    reply = await client.post(path, json={**body, "stream": True})
    *events, done, rest = (await reply.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_beams_are_those_of_the_library(llm: AsyncLLM, client: Any) -> None:
    best = await llm.beam_search(TEXT, BeamSearchParams(beam_width=4, max_tokens=12))
    answer = await post(client, "/v1/completions", {"prompt": TEXT, **BEAMS, "echo": True})
    assert [choice["text"] for choice in answer["choices"]] == [
        TEXT + beam.text for beam in best[:2]
    ]
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert reasons == [beam.finish_reason for beam in best[:2]]
    assert answer["usage"]["completion_tokens"] == sum(len(b.token_ids) for b in best[:2])
    texts = ["", ""]
    for frame in await frames(client, "/v1/completions", {"prompt": TEXT, **BEAMS}):
        for choice in frame["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [beam.text for beam in best[:2]]
    several = {**BEAMS, "prompt": [TEXT, "7, 8,"], "logprobs": 1, "length_penalty": 0.5}
    answer = await post(client, "/v1/completions", several)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])


async def test_chat_has_beams(llm: AsyncLLM, client: Any) -> None:
    best = await llm.beam_search(SUM, BeamSearchParams(beam_width=3, max_tokens=40))
    asked = {"messages": SUM, "use_beam_search": True, "n": 3, "max_tokens": 40}
    answer = await post(client, "/v1/chat/completions", asked)
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert contents == [beam.text for beam in best]
    assert "72" in contents[0]
    streamed = ["", "", ""]
    for frame in await frames(client, "/v1/chat/completions", asked):
        for choice in frame["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == contents


async def test_a_search_ends_with_its_client(llm: AsyncLLM, client: Any) -> None:
    endless = {"prompt": TEXT, "use_beam_search": True, "n": 4, "max_tokens": 1000}
    endless["ignore_eos"] = True
    asking = asyncio.create_task(client.post("/v1/completions", json=endless))
    await until(lambda: llm.stats.generation_tokens > 8)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: llm.stats.finished["abort"] == 1)
    streaming = await client.post("/v1/completions", json={**endless, "stream": True})
    streaming.close()
    await until(lambda: llm.stats.finished["abort"] == 2)
    late = {**endless, "deadline_ms": 60}
    assert (await client.post("/v1/completions", json=late)).status == 408


async def test_searches_are_refused_with_400(client: Any) -> None:
    for fields, param in (
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"n": 65}, "n"),
        ({"temperature": 0.7}, "temperature"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stop_token_ids": list(range(9))}, "stop_token_ids"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"prompt": [10**6]}, "prompt"),
    ):
        asked = {"prompt": TEXT, "use_beam_search": True, **fields}
        reply = await client.post("/v1/completions", json=asked)
        error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (400, param), error


async def test_a_continuation_scores_as_it_was_generated(llm: AsyncLLM, client: Any) -> None:
    """The way of lm-evaluation-harness, with OpenAI's own client."""
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    prompt = await llm.encode(TEXT)
    answer = await llm.generate(prompt, greedy)
    assert answer.logprobs is not None
    url = str(client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as official:
        scored = await official.completions.create(
            model=llm.model_name,
            prompt=[*prompt, *answer.token_ids],
            max_tokens=0,
            logprobs=1,
            echo=True,
            temperature=0,
        )
    [choice] = scored.choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    logprobs = choice.logprobs.token_logprobs[len(prompt) :]
    expected = [entry.logprob for entry in answer.logprobs]
    assert logprobs == pytest.approx(expected, abs=1e-4)
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.top_logprobs is not None
    # What was generated greedily is the likeliest; and every token's text is at its offset.
    names = choice.logprobs.tokens
    for i, offset in enumerate(choice.logprobs.text_offset):
        if i >= len(prompt):
            assert [names[i]] == list(choice.logprobs.top_logprobs[i])
        assert choice.text[offset : offset + len(names[i])] == names[i]
    assert "".join(names) == choice.text


async def test_best_of_returns_the_likeliest_of_its_samples(llm: AsyncLLM, client: Any) -> None:
    asked = {"prompt": TEXT, "temperature": 1, "seed": 3, "max_tokens": 6, "logprobs": 0}
    every = await post(client, "/v1/completions", {**asked, "n": 6})
    best = await post(client, "/v1/completions", {**asked, "n": 2, "best_of": 6})
    means = {
        choice["text"]: sum(choice["logprobs"]["token_logprobs"])
        / len(choice["logprobs"]["tokens"])
        for choice in every["choices"]
    }
    order = sorted(every["choices"], key=lambda choice: -means[choice["text"]])
    assert [c["text"] for c in best["choices"]] == [c["text"] for c in order[:2]]
    total = every["usage"]["completion_tokens"]
    assert best["usage"]["completion_tokens"] == total
    assert len(llm.stats.finished) >= 3


async def test_several_greedy_answers_share_one_prefill(llm: AsyncLLM, client: Any) -> None:
    asked = {"prompt": TEXT * 40, "temperature": 0, "n": 3, "max_tokens": 5}
    before = llm.stats.step_tokens.total
    answer = await post(client, "/v1/completions", asked)
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    computed = llm.stats.step_tokens.total - before
    prompt = answer["usage"]["prompt_tokens"]
    assert computed < prompt + 3 * (llm.limits.page_size + 5)


async def test_the_client_gets_what_the_library_gives(llm: AsyncLLM, client: Any) -> None:
    only = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)
    both = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=0)
    async with Client(str(client.make_url("/"))) as client:
        for prompt in (TEXT, SUM):
            for params in (only, both) if prompt is TEXT else (both,):
                here = await llm.generate(prompt, params)
                there = await client.generate(prompt, params)
                assert (there.text, there.token_ids) == (here.text, here.token_ids)
                check_scores(there.prompt_logprobs, here.prompt_logprobs)
                streamed = [delta async for delta in client.stream(prompt, params)]
                [scores] = [d.prompt_logprobs for d in streamed if d.prompt_logprobs]
                check_scores(scores, here.prompt_logprobs)


def check_scores(
    there: Sequence[PromptLogprob | None] | None, here: Sequence[PromptLogprob | None] | None
) -> None:
    assert there is not None
    assert here is not None
    assert there[0] is here[0] is None
    for entry, other in zip(there[1:], here[1:], strict=True):
        assert entry is not None
        assert other is not None
        assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in entry.top] == [token for token, _ in other.top]
