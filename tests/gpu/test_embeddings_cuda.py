"""Embeddings on a GPU: against transformers, beside captured steps, in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncllm import AsyncLLM
from tests.cpu.executor.test_prompt_logprobs import LENGTHS, PLAIN, prompt_of
from tests.cpu.llm.test_embeddings import POOLINGS, check
from tests.gpu.test_prompt_logprobs_cuda import MODES
from tests.support.models import tiny_models
from tests.support.text import tokenizers as tokenizers_for_tests

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "qwen3"])
async def test_they_equal_transformers(
    family: str, mode: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    async with AsyncLLM(folder, device="cuda", dtype="float32", **MODES[mode]) as llm:
        prompts = [prompt_of(length) for length in LENGTHS]
        plain = [await llm.generate(prompt, PLAIN) for prompt in prompts]
        vectors = [asyncio.create_task(llm.embed(prompts, pooling=p)) for p in POOLINGS]
        answers = await asyncio.gather(*(llm.generate(prompt, PLAIN) for prompt in prompts))
        assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
        for pooling, task in zip(POOLINGS, vectors, strict=True):
            for vector, prompt in zip(await task, prompts, strict=True):
                check(vector, folder, prompt, pooling)


async def test_bfloat16_is_near(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")
    prompts = [prompt_of(length) for length in LENGTHS]
    async with AsyncLLM(folder, device="cuda", dtype="float32") as llm:
        right = await llm.embed(prompts, pooling="mean")
    async with AsyncLLM(folder, device="cuda", dtype="bfloat16") as llm:
        vectors = await llm.embed(prompts, pooling="mean")
    assert vectors.dtype == np.float32
    assert np.einsum("ij,ij->i", right, vectors).min() > 0.99


async def test_pooling_takes_little_memory(tmp_path: Path) -> None:
    """A step holds some copies of its hidden states; those of all prompts would take 512 MiB."""
    tiny_models.make("qwen3", tmp_path, hidden_size=1024, max_position_embeddings=8192)
    (tmp_path / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    async with AsyncLLM(tmp_path, device="cuda", gpu_memory_utilization=0.5) as llm:
        reserved = torch.cuda.memory_reserved()
        vectors = await llm.embed([[n] * 8000 for n in range(4, 20)], pooling="mean")
        assert np.isfinite(vectors).all()
        assert torch.cuda.memory_reserved() <= reserved + 2**28
