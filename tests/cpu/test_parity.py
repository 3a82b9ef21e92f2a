"""Greedy output of the whole engine against transformers' float32 ``generate``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLM
from tests.cpu import tiny_models
from tests.cpu.reference import GREEDY, NEW_TOKENS, answers, check

#: How the engine may run without any token changing.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 16": {"prefill_chunk": 16},
    "no overlap": {"steps_in_flight": 1, "page_size": 4},
    "preempting": {"kv_cache_tokens": 480, "page_size": 2, "max_model_len": 270},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
async def test_greedy_tokens_and_logprobs_equal_transformers(
    family: str, mode: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    options = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, **MODES[mode]}
    async with AsyncLLM(folder, **options) as llm:
        longest = llm.limits.max_model_len - NEW_TOKENS
        expected = [answer for answer in answers(folder) if len(answer.prompt) <= longest]
        if mode in ("default", "chunks of 16"):
            for answer in expected:
                check(await llm.generate(answer.prompt, GREEDY), answer)
        together = await asyncio.gather(*(llm.generate(a.prompt, GREEDY) for a in expected))
        for completion, answer in zip(together, expected, strict=True):
            check(completion, answer)
        assert (llm.stats.preemptions > 0) == (mode == "preempting")
        assert llm.stats.pages_held == 0
