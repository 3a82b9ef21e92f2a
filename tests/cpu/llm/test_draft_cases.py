"""A few of ``draft_cases``: CONTRIBUTING names the command for ten thousand. And a distribution."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLM, SamplingParams
from tests.cpu.llm.draft_cases import FAMILIES, run
from tests.cpu.llm.random_cases import CPU
from tests.support.engine.drafting import draft_answers

pytestmark = pytest.mark.slow

ALLOWED = (11, 57)
PROMPT = [5, 6, 7, 5, 6, 7]
LENGTH, REQUESTS, TEMPERATURE = 5, 700, 2.0


async def test_drafts_change_no_answer(folder_of: Callable[[str], Path]) -> None:
    folders = {family: folder_of(family) for family in FAMILIES}
    happened = await run(folders, 48, in_round=12)
    assert min(happened[what] for what in ("drafts", "right", "length")) > 10


async def test_drafts_change_no_distribution(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of five tokens, each one of two, are as frequent as the model's logprobs say."""
    paths = list(itertools.product(ALLOWED, repeat=LENGTH))
    chance = random.Random(4)
    async with AsyncLLM(folder_of("qwen3"), max_num_seqs=64, max_model_len=64, **CPU) as llm:
        scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
        weights: dict[tuple[int, ...], float] = {}
        for path, whole in zip(
            paths, await llm.generate([[*PROMPT, *path] for path in paths], scored), strict=True
        ):
            assert whole.prompt_logprobs is not None
            for at, entry in enumerate(whole.prompt_logprobs[len(PROMPT) :], 1):
                assert entry is not None
                weights[path[:at]] = math.exp(entry.logprob / TEMPERATURE)
        likely = dict.fromkeys(paths, 1.0)
        for path, at in itertools.product(paths, range(LENGTH)):
            others = sum(weights[(*path[:at], token)] for token in ALLOWED)
            likely[path] *= weights[path[: at + 1]] / others
        drafts = {seed: chance.choice(paths) for seed in range(REQUESTS)}
        counts = draft_answers(llm._own.engine, drafts, monkeypatch)
        params: dict[str, Any] = {
            "max_tokens": LENGTH,
            "ignore_eos": True,
            "temperature": TEMPERATURE,
        }
        room = asyncio.Semaphore(24)  # so that a step has room for drafts

        async def answer(seed: int) -> tuple[int, ...]:
            own = SamplingParams(seed=seed, allowed_token_ids=ALLOWED, **params)
            async with room:
                return tuple((await llm.generate(PROMPT, own)).token_ids)

        answers = await asyncio.gather(*map(answer, drafts))
    assert sum(counts) > REQUESTS / 4
    found = Counter(answers)
    squares = sum((found[path] - REQUESTS * p) ** 2 / (REQUESTS * p) for path, p in likely.items())
    # Chi-squared with 31 degrees of freedom: above 61 in one of a thousand draws of seeds.
    assert squares < 61
