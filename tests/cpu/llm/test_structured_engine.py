"""Grammars through the whole engine: the demo model, however its steps are run."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from asyncllm import AsyncLLM, BadRequest, SamplingParams
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.errors import ConstraintError
from asyncllm.llm.loaded import OwnEngine
from asyncllm.text.grammar import Choice, Ebnf, JsonSchema, Regex
from asyncllm.text.structured import StructuredOutput
from asyncllm.types import Completion, FinishReason, Reasoning
from tests.cpu.llm.test_constraints_engine import MODES, PROMPTS
from tests.cpu.llm.test_parity import expect_short_outputs

PERSON = JsonSchema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
DATE = Regex("[0-9]{4}-[0-9]{2}-[0-9]{2}")


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert len(person["name"]) <= 8
    assert 0 <= person["age"] <= 99
    assert set(person["tags"]) <= {"a", "b"}
    assert len(person["tags"]) <= 3


def asked() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"grammar": PERSON},
        {"grammar": DATE, "temperature": 2.0, "top_p": 0.95},
        {},
        {"grammar": PERSON, "temperature": 0.0, "presence_penalty": 1.0, "bad_words": ("b",)},
        {"grammar": Choice(("yes", "no", "not at all")), "logit_bias": {5: 3.0}},
        {"bad_words": ("the", "a")},
        {"grammar": PERSON, "ignore_eos": True, "repetition_penalty": 1.1},
    ]
    return [SamplingParams(**{"seed": i, "max_tokens": 80, **kind}) for i, kind in enumerate(kinds)]


async def give_back(llm: AsyncLLM) -> None:
    """All pages are, once the rows behind an end have landed."""
    async with asyncio.timeout(10):
        while llm.stats.pages_held:  # noqa: ASYNC110 (nobody tells when)
            await asyncio.sleep(0.001)


async def answers(llm: AsyncLLM, *, together: bool) -> list[Completion]:
    work = [(PROMPTS[i % len(PROMPTS)], params) for i, params in enumerate(asked())]
    if together:
        return await asyncio.gather(*(llm.generate(*each) for each in work))
    return [await llm.generate(*each) for each in work]


async def test_the_way_steps_run_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.engine.scheduling.decode.MULTI_STEP_SECONDS", 10.0)
    found = {}
    for mode, options in MODES.items():
        async with AsyncLLM(device="cpu", cpu_threads=1, **options) as llm:
            if mode == "preempting":
                expect_short_outputs(llm)
            done = await answers(llm, together=True)
            found[mode] = [completion.token_ids for completion in done]
            if mode in ("default", "multi-step"):
                alone = await answers(llm, together=False)
                assert [completion.token_ids for completion in alone] == found[mode]
            if mode == "preempting":
                assert llm.stats.preemptions > 0
            await give_back(llm)
    for mode in MODES:
        assert found[mode] == found["default"], mode
    for completion, params in zip(done, asked(), strict=True):
        if params.grammar is not None:
            assert completion.finish_reason is FinishReason.STOP
        if params.grammar is PERSON:
            check_person(completion.text)
    assert re.fullmatch(DATE.pattern, done[1].text)
    assert done[4].text in ("yes", "no", "not at all")


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(device="cpu", cpu_threads=1, max_model_len=128) as llm:
        yield llm


async def test_answers_end_where_the_grammar_says(llm: AsyncLLM) -> None:
    eos = set(llm.limits.eos_token_ids)
    free = SamplingParams(grammar=Regex("[a-z]{0,9}"), max_tokens=30, temperature=0.0)
    longest = SamplingParams(
        grammar=Regex("[a-z]{0,9}"), max_tokens=30, min_tokens=4, temperature=0.0, ignore_eos=True,
        logit_bias=dict.fromkeys(eos, 100.0),
    )  # fmt: skip
    nothing = await llm.generate("Say", replace(free, logit_bias=dict.fromkeys(eos, 100)))
    assert nothing.text == ""
    assert len(nothing.token_ids) == 1
    assert nothing.finish_reason is FinishReason.STOP
    assert nothing.stop_reason is None
    some = await llm.generate("Say", longest)
    assert len(some.token_ids) == 5  # four, and the end
    assert some.finish_reason is FinishReason.STOP
    # It must end before min_tokens where nothing else may follow.
    short = SamplingParams(grammar=Choice(("no",)), max_tokens=30, min_tokens=20, seed=1)
    done = await llm.generate("Say", short)
    assert (done.text, done.finish_reason) == ("no", FinishReason.STOP)
    cut = await llm.generate("Say", SamplingParams(grammar=DATE, max_tokens=4, seed=2))
    assert (len(cut.token_ids), cut.finish_reason) == (4, FinishReason.LENGTH)
    assert re.fullmatch(r"[0-9]{4}-?[0-9]*-?[0-9]*|[0-9]+", cut.text)
    stopped = SamplingParams(grammar=DATE, max_tokens=30, stop=("-",), seed=2)
    year = await llm.generate("Say", stopped)
    assert re.fullmatch("[0-9]{4}", year.text)
    assert (year.finish_reason, year.stop_reason) == (FinishReason.STOP, "-")


async def test_a_grammar_begins_after_limited_reasoning(llm: AsyncLLM) -> None:
    [end] = llm.tokenizer.encode("|", False)
    for is_open in (True, False):
        start = () if is_open else (end,)
        reasoning = Reasoning(start, (end,), is_open=is_open, max_tokens=6)
        params = SamplingParams(
            grammar=DATE, reasoning=reasoning, max_tokens=40, seed=1, logit_bias={end: 3.0}
        )
        completion = await llm.generate("Once upon a time", params)
        found = re.fullmatch(r"((?s:.)*\|)?([0-9]{4}-[0-9]{2}-[0-9]{2})", completion.text)
        assert found
        assert completion.finish_reason is FinishReason.STOP
        if is_open:
            assert completion.token_ids.index(end) <= 6
            assert found[1]


async def test_what_is_no_grammar_is_refused(llm: AsyncLLM) -> None:
    for grammar in (Regex("("), Choice(()), "[a-z]", {"type": "object"}):
        with pytest.raises(BadRequest) as caught:
            await llm.generate("Say", SamplingParams(grammar=grammar))
        assert caught.value.param == "grammar"
    with pytest.raises(BadRequest, match="prepare"):
        llm.submit([5], SamplingParams(grammar=DATE), Collector())


async def test_constraints_that_exclude_each_other_end_their_request_alone(llm: AsyncLLM) -> None:
    a = llm.tokenizer.encode("a", False)
    healthy = SamplingParams(grammar=PERSON, seed=3, max_tokens=80)
    alone = await llm.generate("Say", healthy)
    dead = SamplingParams(grammar=DATE, allowed_token_ids=tuple(a), max_tokens=9)
    beside, failed = await asyncio.gather(
        llm.generate("Say", healthy), llm.generate("Say", dead), return_exceptions=True
    )
    assert isinstance(failed, ConstraintError)
    assert not isinstance(beside, BaseException)
    assert beside.token_ids == alone.token_ids
    check_person(beside.text)


async def test_a_prompt_whose_constraints_failed_is_in_the_cache(llm: AsyncLLM) -> None:
    prompt = list(range(100, 150))
    a = llm.tokenizer.encode("a", False)
    dead = SamplingParams(grammar=DATE, allowed_token_ids=tuple(a), max_tokens=9)
    with pytest.raises(ConstraintError):
        await llm.generate(prompt, dead)
    usage = (await llm.generate(prompt, SamplingParams(max_tokens=1))).usage
    size = llm.limits.page_size
    assert usage.cached_tokens == (len(prompt) - 1) // size * size > 0
    await give_back(llm)


async def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    matcher = StructuredOutput.matcher

    def make(self: StructuredOutput, grammar: bytes) -> Any:
        made.append(matcher(self, grammar))
        return made[-1]

    healthy = SamplingParams(grammar=PERSON, seed=3, max_tokens=80)
    alone = await llm.generate("Say", healthy)
    monkeypatch.setattr(StructuredOutput, "matcher", make)
    failing, collector = Collector(), Collector()
    llm.submit(llm.tokenizer.encode("Say"), await llm.prepare(healthy), collector)
    date = SamplingParams(grammar=Regex("[0-9]+"), max_tokens=60, seed=1)
    llm.submit(llm.tokenizer.encode("Say"), await llm.prepare(date), failing)
    while len(made) < 2:  # noqa: ASYNC110 (made in another thread)
        await asyncio.sleep(0.001)
    made[1].accept(llm.tokenizer.encode("a", False)[0])  # behind its back
    with pytest.raises(ConstraintError):
        await failing.whole()
    whole = await collector.whole()
    assert whole.token_ids == alone.token_ids
    await give_back(llm)


async def test_a_grammar_that_becomes_too_costly_ends_its_request_alone(llm: AsyncLLM) -> None:
    ambiguous = Ebnf('root ::= ("a"{0,1000} "b"?){0,1000}')
    never_end = dict.fromkeys(llm.limits.eos_token_ids, -100.0)
    hostile = SamplingParams(grammar=ambiguous, max_tokens=100, logit_bias=never_end, seed=1)
    healthy = SamplingParams(grammar=PERSON, seed=3, max_tokens=80)
    alone = await llm.generate("Say", healthy)
    ended, whole = await asyncio.gather(
        llm.generate("Say", hostile), llm.generate("Say", healthy), return_exceptions=True
    )
    assert isinstance(ended, ConstraintError)
    assert "too costly" in ended.message
    assert not isinstance(whole, BaseException)
    assert whole.token_ids == alone.token_ids
    await give_back(llm)


async def test_what_was_compiled_stays_as_long_as_its_request(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = [f"{letter}{{30}}" for letter in "abcdefgh"]
    prepared = [
        await llm.prepare(SamplingParams(grammar=Regex(pattern), max_tokens=60))
        for pattern in patterns
    ]
    engine = llm._started.engine
    assert isinstance(engine, OwnEngine)
    structured = engine._structured
    compiler = structured._compiler
    assert compiler is not None
    compiler._kept.clear()  # all others are forgotten

    def build(*_: object) -> Any:
        raise AssertionError("nothing is compiled for requests that run")

    monkeypatch.setattr(compiler, "_build", build)
    collectors = [Collector() for _ in prepared]
    prompt = llm.tokenizer.encode("Say")
    for params, collector in zip(prepared, collectors, strict=True):
        llm.submit(prompt, params, collector)
    del params
    prepared.clear()
    texts = [(await collector.whole()).text for collector in collectors]
    assert texts == [letter * 30 for letter in "abcdefgh"]
    await give_back(llm)
    gc.collect()
    assert not compiler._alive
