"""Greedy output of the whole engine against transformers' float32 ``generate``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncllm import AsyncLLM, Completion, SamplingParams
from tests.cpu import tiny_models
from tests.unit import tokenizers_for_tests

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 100, 257, 600)
NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=3)

#: How the engine may run without any token changing.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 16": {"prefill_chunk": 16},
    "no overlap": {"steps_in_flight": 1, "page_size": 4},
    "preempting": {"kv_cache_tokens": 480, "page_size": 2, "max_model_len": 270},
}


class Expected(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    """float32 [tokens, vocab], before each token."""


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a family, with a tokenizer beside it; made once."""

    @lru_cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        tiny_models.make(family, folder)
        (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
        return folder

    return make


@lru_cache
def reference(folder: Path) -> list[Expected]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    answers = []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(4, model.config.vocab_size, (1, length), generator=generator)
        with torch.no_grad():
            whole = model.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS)
            logits = model(whole[:, :-1]).logits[0, length - 1 :]
        answers.append(
            Expected(prompt[0].tolist(), whole[0, length:].tolist(), logits.log_softmax(-1))
        )
    return answers


def check(completion: Completion, expected: Expected) -> None:
    assert completion.token_ids == expected.tokens
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(expected.tokens)
    for entry, row in zip(completion.logprobs, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        best = row.topk(3)
        for (token, logprob), value in zip(entry.top, best.values.tolist(), strict=True):
            assert logprob == pytest.approx(value, abs=1e-4)
            assert row[token].item() == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
async def test_greedy_tokens_and_logprobs_equal_transformers(
    family: str, mode: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    expected = reference(folder)
    async with AsyncLLM(folder, device="cpu", dtype="float32", **MODES[mode]) as llm:
        longest = llm.limits.max_model_len - NEW_TOKENS
        expected = [answer for answer in expected if len(answer.prompt) <= longest]
        if mode == "default":
            for answer in expected:
                check(await llm.generate(answer.prompt, GREEDY), answer)
        together = await asyncio.gather(*(llm.generate(a.prompt, GREEDY) for a in expected))
        for completion, answer in zip(together, expected, strict=True):
            check(completion, answer)
        if mode == "preempting":
            assert llm.stats.preemptions > 0
        assert llm.stats.pages_held == 0
