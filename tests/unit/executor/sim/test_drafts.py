"""The simulated device verifies drafts, and gives the tokens that it gives without."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.types import Completion
from tests.support.engine.drafting import draft_answers


async def test_tokens_and_logprobs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(device="sim", max_model_len=512) as llm:
        engine = llm._own.engine

        async def answers() -> list[Completion]:
            params = [
                SamplingParams(seed=i, max_tokens=70, logprobs=1 if i == 1 else None)
                for i in range(3)
            ]
            return await asyncio.gather(*(llm.generate([7] * 20, each) for each in params))

        plain = await answers()
        known = {i: answer.token_ids for i, answer in enumerate(plain)}
        counts = draft_answers(engine, known, monkeypatch, seed=3)
        before = engine.stats.steps
        found = await answers()
        assert [(each.token_ids, each.logprobs) for each in found] == [
            (each.token_ids, each.logprobs) for each in plain
        ]
        assert sum(counts) > 60
        assert engine.stats.steps - before < 70
