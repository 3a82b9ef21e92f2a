"""With a head that drafts, answers are what they are without: tokens, logprobs and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from asyncllm import AsyncLLM, ModelError, SamplingParams, SchedulingParams
from asyncllm.engine.scheduling.speculation.learned import LearnedSpeculation
from asyncllm.executor.step.drafter import HeadDrafter
from tests.cpu.llm.test_speculation import CASES, assert_equal, assert_equal_beside_aborted
from tests.cpu.models.test_eagle3 import load, read_states, reference
from tests.cpu.models.test_predicting import Reference
from tests.support.engine.drafting import draft_answers
from tests.support.engine.head_drafts import KnownAnswers, always_draft
from tests.support.models import eagle3

DRAFT = 3
PROMPTS = [
    [number, *(5 + 7 * number + i * i % 13 for i in range(4 + 9 * number))] for number in range(6)
]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "page_size": 8,
    "max_num_seqs": 12,
    "kv_cache_tokens": 480,
    "max_model_len": 120,
}


def eagle_options(folder_of: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    head = eagle3.write(folder / "head", reads=(1, 2, 3))
    return {"model": str(folder_of("llama")), "draft": str(head)}


def mtp_options(
    folder_of: Callable[[str], Path], folder: Path, family: str = "glm4_moe"
) -> dict[str, Any]:
    Reference(family, folder)
    text = folder_of("llama")
    return {"model": str(folder), "tokenizer": str(text), "speculative_config": {"method": "mtp"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["eagle3", "qwen3_5"])
async def llm(
    request: pytest.FixtureRequest,
    folder_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[AsyncLLM]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "eagle3":
        options = eagle_options(folder_of, folder)
    else:
        options = mtp_options(folder_of, folder, request.param)
    async with AsyncLLM(**options, **OPTIONS) as llm:
        yield llm


async def answers_of(llm: AsyncLLM, params: dict[str, Any], together: bool = True) -> list[Any]:
    asked = [(prompt, SamplingParams(seed=i, **params)) for i, prompt in enumerate(PROMPTS)]
    if not together:
        return [await llm.generate(*request) for request in asked]
    return list(await asyncio.gather(*(llm.generate(*request) for request in asked)))


def whole(answers: list[Any]) -> list[list[int]]:
    pairs = zip(PROMPTS, answers, strict=True)
    return [[*prompt, *answer.token_ids] for prompt, answer in pairs]


async def without_drafts(llm: AsyncLLM, params: dict[str, Any]) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearnedSpeculation, "_keeps_out", lambda *_: True)
        return await answers_of(llm, params)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CASES)
async def test_answers_are_the_same(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    params = {"max_tokens": 24, **CASES[name]}
    plain = await without_drafts(llm, params)
    KnownAnswers(whole(plain), monkeypatch, seed=len(name))
    counts = always_draft(llm, monkeypatch)
    for own, other in zip(await answers_of(llm, params, len(name) % 3 > 0), plain, strict=True):
        assert_equal(own, other)
    if params["max_tokens"] > 2 and "grammar" not in params:
        assert any(counts)
    assert llm._own.engine.stats.books_healed == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_preempted_aborted_and_cached(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than fit the cache, of which some are cancelled."""
    params: dict[str, Any] = {"max_tokens": 60, "min_tokens": 59}
    plain = await without_drafts(llm, params)
    KnownAnswers(whole(plain), monkeypatch, seed=7)
    always_draft(llm, monkeypatch)
    asked = [
        (prompt, SamplingParams(seed=i, **params)) for i, prompt in enumerate(PROMPTS) for _ in "ab"
    ]
    await assert_equal_beside_aborted(llm, asked, [each for each in plain for _ in "ab"])
    for own, other in zip(await answers_of(llm, params, together=False), plain, strict=True):
        assert_equal(own, other)
    assert llm._own.engine.stats.books_healed == 0


class Recorded:
    """What the head drafts, by the prompt and the position of the last token before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.drafts: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._go_on = HeadDrafter._go_on
        monkeypatch.setattr(HeadDrafter, "_go_on", lambda *args: self.record(*args))

    def record(self, drafter: HeadDrafter, states: Tensor, rows: Any, count: int) -> Any:
        found = [*self._go_on(drafter, states, rows, count)]
        drafts = torch.stack(found, dim=1).tolist()
        for slot, position, own in zip(rows.slots, rows.positions.tolist(), drafts, strict=True):
            known = tuple(drafter._table._known[int(slot)].tolist())
            self.drafts[known, position] = own
        return iter(found)


async def test_a_head_drafts_as_for_the_whole_text_at_once(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prompts in chunks, from the prefix cache, in decode rows and beside others."""
    options = eagle_options(folder_of, tmp_path)
    recorded = Recorded(monkeypatch)
    target, head = Path(options["model"]), Path(options["draft"])
    model, plain = load(target, head), reference(target, head)
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    async with AsyncLLM(**options, **{**OPTIONS, **chunks, "kv_cache_tokens": 4000}) as llm:
        always_draft(llm, monkeypatch)
        for again in (False, True):
            recorded.drafts.clear()
            answers = await answers_of(llm, {"max_tokens": 12, "temperature": 0.0})
            for tokens, prompt in zip(whole(answers), PROMPTS, strict=True):
                read = read_states(model, torch.tensor(tokens))
                found = {
                    at: own
                    for (known, at), own in recorded.drafts.items()
                    if list(known) == prompt and at + 2 <= len(tokens)
                }
                assert len(found) >= 8
                for at, own in found.items():
                    # Further drafts may lack a page.
                    sure = own[: OPTIONS["page_size"] - at % OPTIONS["page_size"]]
                    states = [part[: at + 1] for part in read]
                    assert sure == plain.drafts(tokens[: at + 2], states, len(sure))
            assert not again or answers[-1].usage.cached_tokens > 0
        stats = llm.stats
        assert stats.drafts["eagle3"] > 0


@pytest.mark.parametrize(
    ("family", "speculation", "message"),
    [
        ("llama", {"method": "mtp"}, "LlamaForCausalLM has no layer that predicts further tokens"),
        ("qwen3_5", {"method": "mtp"}, "has no layer that predicts further tokens"),
        ("llama", {"method": "eagle3", "model": "nowhere"}, "nowhere"),
        ("llama", {"method": "eagle3", "model": ""}, "architectures"),
    ],
)
async def test_what_cannot_draft_is_refused_at_the_start(
    folder_of: Callable[[str], Path], family: str, speculation: dict[str, str], message: str
) -> None:
    folder = folder_of(family)
    if speculation.get("model") == "":
        speculation = {**speculation, "model": str(folder)}
    with pytest.raises(ModelError, match=message):
        async with AsyncLLM(str(folder), **OPTIONS, speculative_config=speculation):
            pass


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_kept_of_an_answer_with_drafts_is_right(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further turns go on from pages, and from states, that rows with drafts have left."""
    params: dict[str, Any] = {"max_tokens": 45, "ignore_eos": True}
    plain = await without_drafts(llm, params)
    KnownAnswers(whole(plain), monkeypatch, seed=3)
    always_draft(llm, monkeypatch)
    fresh = SchedulingParams(cache_salt="drafts")

    async def turns(scheduling: SchedulingParams) -> list[Any]:
        asked = [[*tokens, 9, 8, 7] for tokens in whole(plain)]
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        return [await llm.generate(tokens, greedy, scheduling) for tokens in asked]

    for prompt, (i, own) in zip(PROMPTS, enumerate(plain), strict=True):
        answer = await llm.generate(prompt, SamplingParams(seed=i, **params), fresh)
        assert_equal(answer, own)
    found = await turns(fresh)
    assert sum(answer.usage.cached_tokens for answer in found) > 100
    with monkeypatch.context() as patch:
        patch.setattr(LearnedSpeculation, "_keeps_out", lambda *_: True)
        for own, other in zip(found, await turns(SchedulingParams(cache_salt="none")), strict=True):
            assert own.token_ids == other.token_ids


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "lfm2"])
async def test_recurrent_layers_go_over_what_was_right(
    folder_of: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of any kind, in models of every kind of recurrent layer."""
    options = {**OPTIONS, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    async with AsyncLLM(str(folder_of(family)), **options) as llm:
        for params in ({"temperature": 0.0}, {"logprobs": 1}, {"repetition_penalty": 1.3}):
            wanted = {"max_tokens": 40, **params}
            plain = await without_drafts(llm, wanted)
            with monkeypatch.context() as patch:
                answers = {i: answer.token_ids for i, answer in enumerate(plain)}
                counts = draft_answers(llm._own.engine, answers, patch, seed=4)
                for own, other in zip(await answers_of(llm, wanted), plain, strict=True):
                    assert_equal(own, other)
                assert len(set(counts)) > 2
        assert llm._own.engine.stats.books_healed == 0
