"""Logprobs of prompts on a GPU: against transformers, beside captured steps, in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLM, BeamSearchParams, SamplingParams
from tests.cpu.executor.test_prompt_logprobs import (
    LENGTHS,
    PLAIN,
    SCORE,
    SCORE_AND_GO,
    check,
    prompt_of,
)
from tests.cpu.llm.test_beam_search import check as check_beams
from tests.cpu.llm.test_beam_search import expected as expected_beams
from tests.support.models import tiny_models
from tests.support.text import tokenizers as tokenizers_for_tests

pytestmark = pytest.mark.gpu

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "no graphs": {"cuda_graphs": False},
    "chunks of 16": {"prefill_chunk": 16},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "qwen3"])
async def test_they_equal_transformers(
    family: str, mode: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    async with AsyncLLM(folder, device="cuda", dtype="float32", **MODES[mode]) as llm:
        prompts = [prompt_of(length) for length in LENGTHS]
        plain = [await llm.generate(prompt, PLAIN) for prompt in prompts]
        jobs = [(prompt, params) for prompt in prompts for params in (SCORE, SCORE_AND_GO, PLAIN)]
        answers = await asyncio.gather(*(llm.generate(*job) for job in jobs))
        for (prompt, params), answer in zip(jobs, answers, strict=True):
            if params is not PLAIN:
                check(answer.prompt_logprobs, folder, prompt)
            if params is not SCORE:
                assert answer.token_ids == plain[prompts.index(prompt)].token_ids


async def test_beams_equal_those_of_transformers(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    async with AsyncLLM(folder, device="cuda", dtype="float32") as llm:
        beams = await llm.beam_search(prompt_of(33), BeamSearchParams(beam_width=4, max_tokens=20))
        search = {"num_beams": 4, "max_new_tokens": 20}
        check_beams(beams, expected_beams(folder, prompt_of(33), search))


async def test_scoring_takes_little_memory(tmp_path: Path) -> None:
    """The logits of a whole chunk would take a gigabyte."""
    tiny_models.make("qwen3", tmp_path, vocab_size=150_000, max_position_embeddings=4096)
    (tmp_path / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    async with AsyncLLM(tmp_path, device="cuda", gpu_memory_utilization=0.5) as llm:
        prompt = [5] * 3000
        await llm.generate(prompt, SamplingParams(max_tokens=0))
        reserved = torch.cuda.memory_reserved()
        scored = SamplingParams(max_tokens=0, prompt_logprobs=20)
        await asyncio.gather(*(llm.generate([n, *prompt[1:]], scored) for n in range(4, 8)))
        assert torch.cuda.memory_reserved() <= reserved + 2**28
