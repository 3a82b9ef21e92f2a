"""Client and AsyncLLM give the same answers: the demo model, served, and in this process."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
from pytest_aiohttp import AiohttpServer

from asyncllm import AsyncLLM, Client, EmbeddingParams, SamplingParams
from asyncllm.errors import BadRequest
from asyncllm.text.grammar import Choice, Ebnf, JsonObject, JsonSchema, Regex, StructuralTags, Tag
from asyncllm.types import Reasoning, TokenDelta

PROMPTS: list[Any] = [
    "Once upon a time",
    [20, 332, 223],
    [{"role": "user", "content": "What is 2+2?"}],
]
WORD = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
GRAMMARS = (
    JsonObject(),
    JsonSchema(WORD),
    Regex("[a-c]{3,5}"),
    Choice(("yes", "no")),
    Ebnf('root ::= "a" [0-9]+ "z"'),
    StructuralTags((Tag("<a>", WORD, "</a>"),), ("<a",)),
)
#: Each parameter, as far as every route can send it; with others that it needs to have an effect.
EACH: dict[str, tuple[dict[str, Any], ...]] = {
    "temperature": ({"temperature": 0.7, "seed": 1},),
    "top_p": ({"top_p": 0.5, "temperature": 1.0, "seed": 2},),
    "top_k": ({"top_k": 3, "temperature": 1.0, "seed": 3},),
    "min_p": ({"min_p": 0.3, "temperature": 1.0, "seed": 4},),
    "presence_penalty": ({"presence_penalty": 2.0},),
    "frequency_penalty": ({"frequency_penalty": -1.0},),
    "repetition_penalty": ({"repetition_penalty": 1.5},),
    "logit_bias": ({"logit_bias": {20: 50.0, 332: -100.0}, "max_tokens": 3}, {"logit_bias": {}}),
    "allowed_token_ids": ({"allowed_token_ids": (20, 332, 223)},),
    "bad_words": ({"bad_words": ("the", "was", (223,))},),
    "prediction": ({"prediction": " there was a dog. It was"},),
    "grammar": tuple({"grammar": grammar} for grammar in GRAMMARS),
    "max_tokens": ({"max_tokens": 3}, {"max_tokens": None}),
    "min_tokens": ({"min_tokens": 8},),
    "stop": ({"stop": (" a", "=")},),
    "stop_token_ids": ({"stop_token_ids": (223,)},),
    "ignore_eos": ({"ignore_eos": True},),
    "include_stop_str_in_output": ({"stop": " a", "include_stop_str_in_output": True},),
    "skip_special_tokens": ({"ignore_eos": True, "skip_special_tokens": False},),
    "seed": ({"seed": -(2**63), "temperature": 1.0},),
    "logprobs": ({"logprobs": 0}, {"logprobs": 3}),
    "prompt_logprobs": ({"prompt_logprobs": 0}, {"prompt_logprobs": 2, "logprobs": 1}),
}
#: And those that none can; ``max_tokens`` 0 only chats cannot.
UNSENT: dict[str, tuple[dict[str, Any], ...]] = {
    "reasoning": ({"reasoning": Reasoning(end_ids=(5,))},),
    "shown_special_tokens": ({"shown_special_tokens": (1,)},),
    "grammar": tuple(
        {"grammar": StructuralTags((Tag("<a>", WORD, "</a>"),), ("<a",), **flags)}
        for flags in ({"at_least_one": True}, {"stop_after_first": True}, {"free_text": False})
    ),
}
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=5, max_tokens=12, ignore_eos=True, skip_special_tokens=False),
    SamplingParams(seed=6, top_k=20, min_p=0.02, repetition_penalty=1.2, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=12, stop=("=", " a"), include_stop_str_in_output=True),
    SamplingParams(temperature=0, max_tokens=8, logprobs=0),
]


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(device="cpu", cpu_threads=1, max_model_len=64) as llm:
        yield llm


@pytest.fixture
async def client(llm: AsyncLLM, aiohttp_server: AiohttpServer) -> AsyncIterator[Client]:
    server = await aiohttp_server(llm.aiohttp_app(), access_log=None, shutdown_timeout=0.1)
    async with Client(str(server.make_url("/v1"))) as client:
        yield client


async def test_the_same_vectors(llm: AsyncLLM, client: Client) -> None:
    for prompts in ("Once upon a time", [20, 332, 223], ["One", "two", "three"], [[20], [332]]):
        for params in (EmbeddingParams(), EmbeddingParams(pooling="mean", dimensions=7)):
            expected = await llm.embed(prompts, params)
            found = await client.embed(prompts, params)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            # A prefix that is cached changes the last bits.
            np.testing.assert_allclose(found, expected, atol=1e-5)


async def test_the_same_answers(llm: AsyncLLM, client: Client) -> None:
    # One at a time: the last bits of logprobs depend on what else is in the batch.
    for prompt, params in itertools.product(PROMPTS, PARAMS):
        await assert_same(llm, client, prompt, params)


async def assert_same(llm: AsyncLLM, client: Client, prompt: Any, params: SamplingParams) -> None:
    expected = await llm.generate(prompt, params)
    scores = expected.prompt_logprobs
    expected.prompt_logprobs = None if scores is None else list(scores)
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
        prompt_logprobs=expected.prompt_logprobs,
    )


def test_every_parameter_is_tried() -> None:
    assert EACH.keys() | UNSENT.keys() == set(SamplingParams.__struct_fields__)


async def test_every_parameter_has_the_same_effect(
    llm: AsyncLLM, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[SamplingParams] = []
    submit = llm.submit

    def record(prompt_ids: Any, params: SamplingParams, *others: Any) -> int:
        submitted.append(params)
        return submit(prompt_ids, params, *others)

    monkeypatch.setattr(llm, "submit", record)
    for case, prompt in itertools.product(itertools.chain(*EACH.values()), PROMPTS):
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0} | case)
        expected = await llm.generate(prompt, params)
        got = await client.generate(prompt, params)
        if params.prompt_logprobs is not None:
            expected.prompt_logprobs = list(expected.prompt_logprobs or ())
        assert got == expected
        if prompt is not PROMPTS[2]:  # what a template adds
            here, there = submitted[-2:]
            room = there.max_tokens if here.max_tokens is None else here.max_tokens
            assert there == msgspec.structs.replace(here, max_tokens=room)
    for prompt in PROMPTS[:2]:
        await assert_same(llm, client, prompt, SamplingParams(max_tokens=0, prompt_logprobs=1))


async def test_what_cannot_be_sent_is_refused_by_name(client: Client) -> None:
    for name, cases in UNSENT.items():
        for case, prompt in itertools.product(cases, PROMPTS):
            params = SamplingParams(**case)
            for call in (client.generate(prompt, params), anext(client.stream(prompt, params))):
                with pytest.raises(BadRequest, match=name) as caught:
                    await call
                assert caught.value.param == name
    with pytest.raises(BadRequest) as caught:
        await client.generate(PROMPTS[2], SamplingParams(max_tokens=0))
    assert caught.value.param == "max_tokens"


IMPOSSIBLE: list[tuple[Any, SamplingParams]] = [
    ("a" * 5000, SamplingParams()),
    ([5] * 64, SamplingParams()),
    ([5] * 50, SamplingParams(max_tokens=50)),
    ([10**6], SamplingParams(max_tokens=1)),
    ([5], SamplingParams(max_tokens=1, stop_token_ids=(10**6,))),
]


async def test_the_same_errors(llm: AsyncLLM, client: Client) -> None:
    for prompt, params in IMPOSSIBLE:
        with pytest.raises(BadRequest) as expected:
            await llm.generate(prompt, params)
        for call in (client.generate(prompt, params), anext(client.stream(prompt, params))):
            with pytest.raises(BadRequest) as got:
                await call
            assert (got.value.param, got.value.code) == (expected.value.param, expected.value.code)
