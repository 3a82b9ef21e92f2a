"""The schemas of every common kind, asked of a model with random weights: it obeys nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.text.grammar import JsonSchema
from asyncllm.types import Completion, FinishReason
from tests.support.text.grammar_sampling import check_valid
from tests.support.text.grammar_schemas import SCHEMAS

SEEDS = range(3)


async def answers(llm: AsyncLLM) -> dict[tuple[str, int], Completion]:
    asked = [(name, seed) for name in SCHEMAS for seed in SEEDS]
    params = [
        SamplingParams(
            grammar=JsonSchema(SCHEMAS[name]), seed=seed, temperature=1.0, max_tokens=250
        )
        for name, seed in asked
    ]
    done = await asyncio.gather(*(llm.generate("JSON:", each) for each in params))
    return dict(zip(asked, done, strict=True))


async def test_every_finished_answer_is_valid() -> None:
    options: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "load_format": "dummy"}
    async with AsyncLLM(**options, max_model_len=300) as llm:
        found = await answers(llm)
    ended = {key: found[key] for key in found if found[key].finish_reason is FinishReason.STOP}
    wrong = {}
    for (name, seed), completion in ended.items():
        try:
            check_valid(SCHEMAS[name], completion.text)
        except (jsonschema.ValidationError, ValueError) as error:
            wrong[name, seed] = (completion.text, str(error))
    assert not wrong
    others = {completion.finish_reason for completion in found.values()} - {FinishReason.STOP}
    assert others <= {FinishReason.LENGTH}
    # Or little would have been tried.
    assert len({name for name, _ in ended}) >= 60, sorted(set(SCHEMAS) - {n for n, _ in ended})
    assert len({completion.text for completion in ended.values()}) > len(SCHEMAS)
