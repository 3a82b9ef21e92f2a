"""Client and AsyncLLM give the same answers: the demo model, served, and in this process."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from asyncllm import AsyncLLM, Client, EmbeddingParams, SamplingParams
from asyncllm.errors import BadRequest
from asyncllm.types import TokenDelta

PROMPTS: list[Any] = [
    "Once upon a time",
    [20, 332, 223],
    [{"role": "user", "content": "What is 2+2?"}],
]
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
async def client(llm: AsyncLLM) -> AsyncIterator[Client]:
    runner = web.AppRunner(llm.aiohttp_app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with Client(f"http://127.0.0.1:{site.port}/v1") as client:
        yield client
    await runner.cleanup()


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
        expected = await llm.generate(prompt, params)
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
        )


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
