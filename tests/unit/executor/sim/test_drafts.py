"""The simulated device verifies drafts, and gives the tokens that it gives without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.executor.sim import virtual_time
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


async def seconds_of(clients: int, mean: float | None) -> float:
    """Of so many answers at once; a row with a draft of 8 tokens yields ``mean`` on average."""
    speculation = None if mean is None else {"synthetic_acceptance": mean}
    options: dict[str, Any] = {"sim_profile": "h200-8b", "max_model_len": 1024}
    async with AsyncLLM(device="sim", speculative_config=speculation, **options) as llm:
        params = [SamplingParams(max_tokens=300, ignore_eos=True, seed=i) for i in range(clients)]
        begun = asyncio.get_running_loop().time()
        await asyncio.gather(*(llm.generate([7, *range(50)], each) for each in params))
        return asyncio.get_running_loop().time() - begun


@pytest.mark.parametrize("clients", [1, 8, 64])
def test_drafts_are_never_slower_and_pay_if_they_are_good(clients: int) -> None:
    plain = virtual_time.run(seconds_of(clients, None))
    assert virtual_time.run(seconds_of(clients, 1.0)) < plain / 0.99, "all are wrong"
    assert virtual_time.run(seconds_of(clients, 6.0)) < plain / 1.2
