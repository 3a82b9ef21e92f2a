"""Constraints through the whole engine: the demo model, however its steps are run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm import LLM, AsyncLLM, BadRequest, SamplingParams
from asyncllm.engine.engine import Engine
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.errors import ConstraintError
from asyncllm.text.tokenizer import bad_word_ids
from asyncllm.types import FinishReason
from tests.cpu.llm.test_parity import expect_short_outputs
from tests.support.server.polling import pages_are_released

#: How the engine may run without any token changing.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "no overlap": {"steps_in_flight": 1},
    "chunks": {"prefill_chunk": 5, "page_size": 4},
    "multi-step": {"max_decode_steps": 3},
    "preempting": {"kv_cache_tokens": 160, "page_size": 2, "max_model_len": 128},
}
PROMPTS = [
    "Once upon a time there was a little",
    "Question: what is the capital of France? Answer:",
    "One, two, three, four,",
    "The",
]


def asked() -> list[SamplingParams]:
    """One for each prompt, again and again; every kind at least once."""
    kinds: list[dict[str, Any]] = [
        {"bad_words": ("the", "a", "and", "of", "girl", "boy", "upon a time")},
        {"allowed_token_ids": tuple(range(20, 600, 2)), "top_p": 0.9},
        {"logit_bias": dict.fromkeys(range(100, 200), 3.0), "min_p": 0.01},
        {"temperature": 0.0, "bad_words": ("the", "he", "to", "was a"), "repetition_penalty": 1.2},
        {"presence_penalty": 1.0, "logit_bias": {5: -100}, "allowed_token_ids": tuple(range(900))},
        {},
        {"temperature": 0.0, "bad_words": ((50,), (60, 61), "five", "six")},
        {"top_k": 20, "logit_bias": {7: 5.0}, "min_tokens": 9, "frequency_penalty": 0.4},
    ]
    shared = {"max_tokens": 24, "ignore_eos": False}
    return [SamplingParams(**{"seed": i, **shared, **kind}) for i, kind in enumerate(kinds)]


async def answers(llm: AsyncLLM, *, together: bool) -> list[list[int]]:
    work = [(PROMPTS[i % len(PROMPTS)], params) for i, params in enumerate(asked())]
    if together:
        done = await asyncio.gather(*(llm.generate(*each) for each in work))
    else:
        done = [await llm.generate(*each) for each in work]
    return [completion.token_ids for completion in done]


async def test_the_way_steps_run_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else a machine that is busy would take single steps.
    monkeypatch.setattr("asyncllm.engine.scheduling.decode.MULTI_STEP_SECONDS", 10.0)
    found = {}
    for mode, options in MODES.items():
        async with AsyncLLM(device="cpu", cpu_threads=1, **options) as llm:
            if mode == "preempting":
                expect_short_outputs(llm)
            found[mode] = await answers(llm, together=True)
            if mode in ("default", "multi-step"):
                assert await answers(llm, together=False) == found[mode]
            if mode == "multi-step":
                engine = llm._started.engine
                assert isinstance(engine, Engine)
                steps = engine.history._steps
                assert sum(step.num_tokens == 3 * step.num_rows for step in steps) > 10
            if mode == "preempting":
                assert llm.stats.preemptions > 0
            await pages_are_released(llm)
    for mode in MODES:
        assert found[mode] == found["default"], mode
    assert all(len(tokens) >= 3 for tokens in found["default"])


@pytest.fixture
async def llm() -> Any:
    async with AsyncLLM(device="cpu", cpu_threads=1, max_model_len=128) as llm:
        yield llm


async def test_bad_words_do_not_come(llm: AsyncLLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    free = await llm.generate(PROMPTS[0], plain)
    words = [word for word in free.text.split() if word.isalpha()][:6]
    assert len(words) > 2
    bad = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, bad_words=tuple(words))
    clean = await llm.generate(PROMPTS[0], bad)
    sequences = await bad_word_ids(llm.tokenizer, words)
    assert any(len(ids) > 1 for ids in sequences)
    for ids in sequences:
        windows = zip(*(clean.token_ids[i:] for i in range(len(ids))), strict=False)
        assert ids not in windows
    assert not set(words) & set(clean.text.split())


async def test_allowed_tokens_and_biases_choose(llm: AsyncLLM) -> None:
    yes, no = llm.tokenizer.encode(" yes", False)[0], llm.tokenizer.encode(" no", False)[0]
    assert yes != no
    allowed = SamplingParams(max_tokens=20, allowed_token_ids=(yes, no), seed=1)
    completion = await llm.generate("Is it?", allowed)
    assert set(completion.token_ids) == {yes, no}
    assert completion.finish_reason is FinishReason.LENGTH
    biased = SamplingParams(max_tokens=5, logit_bias={no: 100}, temperature=0.0)
    assert (await llm.generate("Is it?", biased)).token_ids == [no] * 5


async def test_what_leaves_no_token_fails_alone(llm: AsyncLLM) -> None:
    dead = SamplingParams(max_tokens=30, allowed_token_ids=(50,), bad_words=((50, 50, 50),))
    healthy = SamplingParams(max_tokens=30, seed=3, bad_words=("the",), ignore_eos=True)
    alone = await llm.generate(PROMPTS[0], healthy)
    beside, failed, again = await asyncio.gather(
        llm.generate(PROMPTS[0], healthy),
        llm.generate(PROMPTS[1], dead),
        llm.generate(PROMPTS[1], dead),
        return_exceptions=True,
    )
    assert isinstance(failed, ConstraintError)
    assert "leaves no token" in failed.message
    assert isinstance(again, ConstraintError)
    assert not isinstance(beside, BaseException)
    assert beside.token_ids == alone.token_ids
    await pages_are_released(llm)


async def test_ids_that_do_not_exist_are_refused(llm: AsyncLLM) -> None:
    vocab = llm.limits.vocab_size
    values: list[tuple[str, Any]] = [
        ("logit_bias", {vocab: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("allowed_token_ids", (0, vocab)),
        ("allowed_token_ids", (-1,)),
        ("bad_words", ((5, vocab),)),
    ]
    for name, value in values:
        with pytest.raises(BadRequest) as caught:
            await llm.generate([5], SamplingParams(**{name: value}))
        assert caught.value.param == name


async def test_constraints_are_to_be_prepared(llm: AsyncLLM) -> None:
    params = SamplingParams(bad_words=("cat", " dog"), max_tokens=2)
    with pytest.raises(BadRequest, match="prepare"):
        llm.submit([5], params, Collector())
    ready = await llm.prepare(params)
    assert await llm.prepare(ready) is ready
    collector = Collector()
    llm.submit([5], ready, collector)
    assert len((await collector.whole()).token_ids) == 2


def test_batches_prepare_each_of_their_params() -> None:
    with LLM(device="cpu", cpu_threads=1, max_model_len=128) as llm:
        both = [
            SamplingParams(max_tokens=3, temperature=0.0, logit_bias={token: 100})
            for token in (70, 71)
        ]
        found = llm.generate([[5]] * 6, both * 3)
        assert [completion.token_ids for completion in found] == [[70] * 3, [71] * 3] * 3
        with pytest.raises(BadRequest, match=r"prompt 1: .*logit_bias"):
            llm.generate([[5]] * 2, [both[0], SamplingParams(logit_bias={10**6: 1.0})])
