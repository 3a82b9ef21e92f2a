"""``--deterministic``: the same bits alone and beside others, in any way of serving."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLM, Completion, SamplingParams
from tests.gpu.test_families_cuda import WIDE
from tests.support.engine.drafting import draft_answers
from tests.support.models import quantized, tiny_models
from tests.support.text import tokenizers as tokenizers_for_tests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "deterministic": True,
    "gpu_memory_utilization": 0.5,
    "max_model_len": 1024,
}
#: Other ways to serve; none of them changes a bit.
WAYS: tuple[dict[str, Any], ...] = (
    {"prefill_chunk": 100, "steps_in_flight": 1, "kv_cache_tokens": 3200},
    {"cuda_graphs": False, "prefix_caching": False, "max_num_batched_tokens": 700},
)


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(4, 380, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = ids(0, 300)
PROMPTS = [ids(n, n) for n in (1, 2, 17, 64, 129, 200, 333, 511, 700, 930)]
PROMPTS += [SHARED + ids(n, n) for n in (1, 16, 40, 150, 7, 90)]
OTHERS = [ids(1000 + n, 11 * n + 3) for n in range(40)]


def params(number: int, logprobs: int | None) -> SamplingParams:
    """Half of them greedy, half drawn."""
    temperature, top_p = [(0.0, 1.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.9)][number % 4]
    ends: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    return SamplingParams(
        temperature=temperature, top_p=top_p, seed=number, logprobs=logprobs, **ends
    )


async def alone(llm: AsyncLLM, logprobs: int | None = 2) -> list[Completion]:
    return [await llm.generate(p, params(i, logprobs)) for i, p in enumerate(PROMPTS)]


async def together(llm: AsyncLLM, logprobs: int | None = 2) -> list[Completion]:
    """Beside others, which begin and end meanwhile."""
    noise = [
        llm.generate(p, SamplingParams(max_tokens=5 + i % 30, temperature=0.8))
        for i, p in enumerate(OTHERS)
    ]
    others = asyncio.gather(*noise)
    answers = [llm.generate(p, params(i, logprobs)) for i, p in enumerate(PROMPTS)]
    found = await asyncio.gather(*answers)
    await others
    return list(found)


def same(some: list[Completion], others: list[Completion]) -> int:
    pairs = zip(some, others, strict=True)
    return sum((a.token_ids, a.logprobs) == (b.token_ids, b.logprobs) for a, b in pairs)


async def check(folder: Path, **more: Any) -> None:
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    async with AsyncLLM(folder, **OPTIONS, **more) as llm:
        expected, tokens = await alone(llm), await alone(llm, None)
        assert same(await together(llm), expected) == len(PROMPTS)
        assert same(await together(llm, None), tokens) == len(PROMPTS)
    for way in WAYS:
        async with AsyncLLM(folder, **OPTIONS, **more, **way) as llm:
            assert same(await together(llm), expected) == len(PROMPTS), way
    known = {i: answer.token_ids for i, answer in enumerate(expected)}
    for graphs in (True, False):
        async with AsyncLLM(folder, **OPTIONS, **more, cuda_graphs=graphs) as llm:
            with pytest.MonkeyPatch.context() as patches:
                counts = draft_answers(llm._own.engine, known, patches)
                assert same(await together(llm), expected) == len(PROMPTS), graphs
                assert sum(counts) > 0 or not llm.limits.max_draft_tokens


@pytest.mark.parametrize("family", WIDE)
async def test_same_bits(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path, **WIDE[family])
    await check(folder)


@pytest.mark.parametrize("name", ["fp8-blocks", "compressed-tensors", "awq", "gptq-ordered"])
async def test_same_bits_of_quantised_weights(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 4096, "head_dim": 128}
    folder, _ = quantized.make(name, tmp_path, **sizes)
    await check(folder)


async def test_same_bits_with_an_8_bit_cache(tmp_path: Path) -> None:
    """Its scales are fixed before the first request."""
    folder = tiny_models.make("ministral3", tmp_path, **WIDE["ministral3"])
    await check(folder, kv_cache_dtype="fp8")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_same_bits_of_two_ranks(tmp_path: Path) -> None:
    """Prompts of 8,000 tokens have sums too large for our own kernels."""
    folder = tiny_models.make("ministral3", tmp_path, **WIDE["ministral3"])
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    async with AsyncLLM(folder, **OPTIONS, tp=2) as llm:
        expected = await alone(llm)
        assert same(await together(llm), expected) == len(PROMPTS)
