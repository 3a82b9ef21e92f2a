"""Greedy output of the whole engine against transformers' float32 ``generate``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLM
from asyncllm.engine.engine import Engine
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.models.spec import read_spec
from tests.support.engine.scheduling import expect_outputs
from tests.support.models import tiny_models
from tests.support.models.reference import GREEDY, NEW_TOKENS, answers, check
from tests.support.server.polling import pages_are_released

#: How the engine may run without any token changing.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 1": {"prefill_chunk": 1, "page_size": 8},
    "chunks of 16": {"prefill_chunk": 16},
    "chunks of 64": {"prefill_chunk": 64, "prefix_caching": False},
    "no overlap": {"steps_in_flight": 1, "page_size": 4},
    "multi-step of 3": {"max_decode_steps": 3, "page_size": 2},
    "preempting": {"kv_cache_tokens": 480, "page_size": 2, "max_model_len": 270},
    "host tier": {"kv_cache_tokens": 640, "page_size": 4, "host_kv_gib": 0.01},
}
#: Their attention is Llama's, so that what a mode may change is the same: they share the modes.
LIKE_LLAMA = ("opt", "llama3", "qwen2", "qwen3", "qwen3_moe", "phi3")
CASES = [
    (family, mode)
    for family in tiny_models.REPRESENTATIVE
    for number, mode in enumerate(MODES)
    if family not in LIKE_LLAMA or (number + LIKE_LLAMA.index(family)) % 3 == 0
]


@pytest.mark.parametrize(("family", "mode"), CASES)
async def test_greedy_tokens_and_logprobs_equal_transformers(
    family: str, mode: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    if mode == "host tier" and read_spec(folder).state_bytes(4):
        return  # refused: states are not kept in the host's memory
    options = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, **MODES[mode]}
    async with AsyncLLM(folder, **options) as llm:
        if mode == "preempting":
            expect_short_outputs(llm)
        longest = llm.limits.max_model_len - NEW_TOKENS
        if mode == "chunks of 1":  # as many steps as the longest prompt has tokens
            longest = 257
        expected = [answer for answer in answers(folder) if len(answer.prompt) <= longest]
        if mode != "chunks of 1":  # once is enough
            for answer in expected:
                check(await llm.generate(answer.prompt, GREEDY), answer)
        # Again, all at once: now they are prefix hits, where there is a prefix cache.
        together = await asyncio.gather(*(llm.generate(a.prompt, GREEDY) for a in expected))
        for completion, answer in zip(together, expected, strict=True):
            check(completion, answer)
        await pages_are_released(llm)
        if mode != "host tier":  # where what fits at the expected peak is admitted, nearly all
            assert (llm.stats.preemptions > 0) == (mode == "preempting")
        if mode in ("default", "chunks of 16", "no overlap"):
            cached = sum(completion.usage.cached_tokens for completion in together)
            assert cached > 800, "of the long prompts"
        if mode == "chunks of 64":
            assert llm.stats.cached_tokens == 0


@pytest.mark.parametrize("family", tiny_models.FURTHER)
async def test_further_families_equal_transformers(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    """In one engine: alone and together, in chunks, with prefix hits, preempted."""
    folder = folder_of(family)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}
    options |= {"prefill_chunk": 16, "page_size": 2, "kv_cache_tokens": 640, "max_num_seqs": 100}
    async with AsyncLLM(folder, **options, max_model_len=620) as llm:
        expect_short_outputs(llm)
        expected = answers(folder)
        for answer in expected:
            check(await llm.generate(answer.prompt, GREEDY), answer)
        # Prefix hits start at once, and outgrow the cache.
        many = [max(expected[7:2:-1], key=lambda answer: len(answer.tokens))] * 80 + expected
        together = await asyncio.gather(*(llm.generate(a.prompt, GREEDY) for a in many))
        for completion, answer in zip(together, many, strict=True):
            check(completion, answer)
        cached = sum(completion.usage.cached_tokens for completion in together)
        assert cached > 500
        assert llm.stats.preemptions > 0
        await pages_are_released(llm)


async def test_prompts_that_arrive_together_share_and_stay_right(
    folder_of: Callable[[str], Path],
) -> None:
    folder = folder_of(tiny_models.FAMILIES[0])
    expected = answers(folder)[-1]
    async with AsyncLLM(folder, device="cpu", dtype="float32", cpu_threads=1) as llm:
        same = await asyncio.gather(*(llm.generate(expected.prompt, GREEDY) for _ in range(4)))
        for completion in same:
            check(completion, expected)
        computed = sum(len(expected.prompt) - c.usage.cached_tokens for c in same)
        assert computed < len(expected.prompt) + 4 * llm.limits.page_size


async def test_pages_that_went_through_the_host_are_the_same(
    folder_of: Callable[[str], Path],
) -> None:
    folder = folder_of(tiny_models.FAMILIES[0])
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}
    async with AsyncLLM(folder, **options, **MODES["host tier"]) as llm:
        longest = [a for a in answers(folder) if len(a.prompt) > 256]
        kinds = []
        for _ in range(4):
            for answer in longest:
                collector = Collector()
                id = llm.submit(answer.prompt, GREEDY, collector)
                assert (await collector.whole()).token_ids == answer.tokens
                trace = llm.trace(id)
                assert trace is not None
                kinds += [event.kind for event in trace.events]
        assert kinds.count("loading") >= 2
        assert llm.stats.host_pages_used > 0
        assert 0 < llm.stats.host_cached_tokens <= llm.stats.cached_tokens


def expect_short_outputs(llm: AsyncLLM) -> None:
    """Otherwise no more would be admitted than fit, and nobody preempted."""
    engine = llm._started.engine
    assert isinstance(engine, Engine)
    expect_outputs(engine._scheduler, 0.0)
