"""The simulated device verifies drafts, and gives the tokens that it gives without."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.engine.drafts.drafting import Drafting
from asyncllm.engine.scheduling.speculation.learned import LearnedSpeculation
from asyncllm.types import Completion


class Answer:
    """Drafts an answer that is known, with some tokens changed."""

    kind, prior = "prediction", 0.5

    def __init__(self, answer: Sequence[int], num_prompt: int, chance: random.Random):
        self._answer = answer
        self._num_prompt = num_prompt
        self._chance = chance

    def propose(self, tokens: array[int], most: int) -> list[int]:
        done = len(tokens) - self._num_prompt
        draft = self._answer[done : done + most]
        return [token if self._chance.random() < 0.9 else 5 for token in draft]


async def test_tokens_and_logprobs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(device="sim", max_model_len=512) as llm:
        engine, chance = llm._own.engine, random.Random(1)

        async def answers() -> list[Completion]:
            params = [
                SamplingParams(seed=i, max_tokens=70, logprobs=1 if i == 1 else None)
                for i in range(3)
            ]
            return await asyncio.gather(*(llm.generate([7] * 20, each) for each in params))

        plain = await answers()
        known = [answer.token_ids for answer in plain]

        def drafting(num_prompt: int, params: SamplingParams) -> Drafting:
            return Drafting([Answer(known[params.seed or 0], num_prompt, chance)])

        def best(
            self: Any, found: Any, shape: Any, start: int, spare: int, *_: Any, **__: Any
        ) -> int:
            return min(len(found.tokens), spare)

        monkeypatch.setattr(engine, "_drafting", drafting)
        monkeypatch.setattr(LearnedSpeculation, "_best", best)
        before = engine.stats.steps
        found = await answers()
        assert [(each.token_ids, each.logprobs) for each in found] == [
            (each.token_ids, each.logprobs) for each in plain
        ]
        assert engine.stats.steps - before < 60
        assert engine.stats.drafted["prediction"] > engine.stats.drafted_right["prediction"] > 60
