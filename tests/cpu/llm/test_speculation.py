"""With drafts, right or wrong, answers are what they are without: tokens, logprobs and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.text.grammar import JsonSchema, Regex
from asyncllm.types import Completion
from tests.support.engine.drafting import draft_answers, try_all
from tests.support.engine.scheduling import expect_outputs

LETTERS = Regex(r"[a-z ]{20,60}")
FIXED = JsonSchema(
    {
        "type": "object",
        "properties": {"a quite long name": {"type": "string"}, "other": {"type": "integer"}},
        "required": ["a quite long name", "other"],
        "additionalProperties": False,
    }
)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "filtered": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "logprobs": {"logprobs": 3},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "logprobs": 1,
    },
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.5},
    "bias": {"logit_bias": {11: 5.0, 12: -100.0}},
    "banned": {"bad_words": (" the", " a little", (5, 6)), "temperature": 0.7},
    "min tokens": {"min_tokens": 20, "logprobs": 0},
    "ignores the end": {"ignore_eos": True},
    "stop strings": {"stop": (" and", ".")},
    "stop tokens": {"stop_token_ids": tuple(range(40, 60))},
    "pattern": {"grammar": LETTERS},
    "JSON": {"grammar": FIXED, "logprobs": 2},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}
PROMPTS = (
    "Once upon a time there was a little cat. Once upon a time there was a little",
    "Tom and his dog",
    "The sun was warm. The sun was",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm() -> AsyncIterator[AsyncLLM]:
    options: dict[str, Any] = {"max_num_seqs": 12, "kv_cache_tokens": 240, "max_model_len": 160}
    lookup = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2}
    async with AsyncLLM(
        device="cpu", dtype="float32", page_size=8, speculative_config=lookup, **options
    ) as llm:
        yield llm


def essence(answer: Completion) -> tuple[Any, ...]:
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason


def assert_equal(found: Completion, wanted: Completion) -> None:
    assert essence(found) == essence(wanted)
    assert (found.logprobs is None) == (wanted.logprobs is None)
    for own, other in zip(found.logprobs or (), wanted.logprobs or (), strict=True):
        assert own.token_id == other.token_id
        assert own.logprob == pytest.approx(other.logprob, abs=2e-4)
        values = [value for _, value in own.top]
        assert values == pytest.approx([value for _, value in other.top], abs=2e-4)


def requests(**params: Any) -> list[tuple[str, SamplingParams]]:
    """Some requests, whose seeds are their numbers."""
    given = {"max_tokens": 24, **params}
    return [(PROMPTS[i % len(PROMPTS)], SamplingParams(seed=i, **given)) for i in range(4)]


async def assert_equal_beside_aborted(
    llm: AsyncLLM, wanted: list[tuple[Any, SamplingParams]], expected: list[Any]
) -> None:
    """More requests than fit the cache, of which two are cancelled, have these answers."""
    engine: Any = llm._own.engine
    before = engine.stats.preemptions
    expect_outputs(engine._scheduler, 2.0)
    tasks = [asyncio.ensure_future(llm.generate(*request)) for request in wanted]
    for number in (3, 6):
        for _ in range(40):
            await asyncio.sleep(0)
        tasks[number].cancel()
    for number, task in enumerate(tasks):
        if number not in (3, 6):
            assert_equal(await task, expected[number])
    assert engine.stats.preemptions > before


async def answers_of(
    llm: AsyncLLM, wanted: list[tuple[str, SamplingParams]], together: bool
) -> list[Completion]:
    if not together:
        return [await llm.generate(prompt, params) for prompt, params in wanted]
    return list(await asyncio.gather(*(llm.generate(*request) for request in wanted)))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CASES)
async def test_answers_are_the_same(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wanted = requests(**CASES[name])
    plain = await answers_of(llm, wanted, together=True)
    answers = {i: answer.token_ids for i, answer in enumerate(plain)}
    counts = draft_answers(llm._own.engine, answers, monkeypatch, seed=len(name))
    for own, other in zip(await answers_of(llm, wanted, len(name) % 3 > 0), plain, strict=True):
        assert_equal(own, other)
    assert counts or wanted[0][1].max_tokens in (1, 2)
    assert llm._own.engine.stats.books_healed == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_preempted_aborted_and_cached(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than fit the cache, of which some are cancelled."""
    wanted = [
        (PROMPTS[i % len(PROMPTS)], SamplingParams(seed=i, max_tokens=60, min_tokens=59))
        for i in range(9)
    ]
    plain = await answers_of(llm, wanted, together=True)
    answers = {i: answer.token_ids for i, answer in enumerate(plain)}
    draft_answers(llm._own.engine, answers, monkeypatch, seed=5)
    await assert_equal_beside_aborted(llm, wanted, plain)
    again = await answers_of(llm, wanted[:3], together=False)
    for own, other in zip(again, plain, strict=False):
        assert_equal(own, other)
    assert llm._own.engine.stats.books_healed == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_real_drafts_change_nothing_either(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookup, predictions and grammars, whether they pay on this machine or not."""
    engine: Any = llm._own.engine
    try_all(engine._scheduler, monkeypatch)
    cases: list[dict[str, Any]] = [{"temperature": 0.0}, {"grammar": FIXED}, {"temperature": 0.3}]
    drafting = engine._drafting
    for case in cases:
        wanted = [(prompt, params) for prompt, params in requests(**case, max_tokens=40)]
        monkeypatch.setattr(engine, "_drafting", lambda num_prompt, params: None)
        plain = await answers_of(llm, wanted, together=False)
        monkeypatch.setattr(engine, "_drafting", drafting)
        predicting = [
            (prompt, msgspec.structs.replace(params, prediction=answer.text.replace("a", "e", 1)))
            for (prompt, params), answer in zip(wanted, plain, strict=True)
        ]
        for asked in (wanted, predicting):
            for own, other in zip(await answers_of(llm, asked, True), plain, strict=True):
                assert_equal(own, other)
    stats = engine.stats
    for kind in ("grammar", "prediction", "lookup"):
        assert stats.drafted[kind] >= stats.drafted_right[kind]
    assert stats.drafted_right["grammar"] > 0
    assert stats.drafted_right["prediction"] > 0
