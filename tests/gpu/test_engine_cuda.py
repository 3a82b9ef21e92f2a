"""The whole engine on a GPU: parity, overlap, sampling, and memory given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLM, Completion, SamplingParams
from tests.support.models import tiny_models
from tests.support.models.reference import GREEDY, NEW_TOKENS, answers, check

pytestmark = pytest.mark.gpu

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 16": {"prefill_chunk": 16, "steps_in_flight": 1},
    "preempting": {"kv_cache_tokens": 480, "page_size": 2, "max_model_len": 270},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
async def test_float32_equals_transformers(
    family: str, mode: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    async with AsyncLLM(folder, device="cuda", dtype="float32", **MODES[mode]) as llm:
        longest = llm.limits.max_model_len - NEW_TOKENS
        expected = [answer for answer in answers(folder) if len(answer.prompt) <= longest]
        together = await asyncio.gather(*(llm.generate(a.prompt, GREEDY) for a in expected))
        for completion, answer in zip(together, expected, strict=True):
            check(completion, answer)


async def demo_answers(**options: Any) -> list[Completion]:
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=60, top_p=top_p)
        for seed, (temperature, top_p) in enumerate([(0.0, 1.0), (0.7, 1.0), (0.7, 0.8)] * 4)
    ]
    questions = [[{"role": "user", "content": f"What is {n} + 45?"}] for n in range(20, 32)]
    async with AsyncLLM(device="cuda", **options) as llm:
        return list(await asyncio.gather(*map(llm.generate, questions, params)))


@pytest.mark.parametrize("attention", ["sdpa", "auto"])
async def test_overlap_on_and_off_give_the_same_tokens(attention: str) -> None:
    with_overlap = await demo_answers(attention=attention, steps_in_flight=2)
    without = await demo_answers(attention=attention, steps_in_flight=1)
    assert with_overlap == without
    right = sum(str(n + 45) in with_overlap[n - 20].text for n in range(20, 32, 3))
    assert right == 4


async def test_closing_gives_the_memory_back() -> None:
    """What this process has by PyTorch's allocator: other tests may use the GPU beside this one."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        llm = await AsyncLLM(device="cuda", gpu_memory_utilization=0.5).start()
        await llm.generate("1, 2, 3,", SamplingParams(max_tokens=20))
        assert torch.cuda.memory_reserved() - before > 2**30
        await llm.aclose()
        assert torch.cuda.memory_reserved() - before < 2**29
