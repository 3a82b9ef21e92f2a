"""Beam search against transformers' ``generate`` in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncllm import LLM, AsyncLLM, BadRequest, Beam, BeamSearchParams, SamplingParams
from asyncllm.errors import DeadlineExceeded, EngineDead
from asyncllm.types import FinishReason, SchedulingParams
from tests.cpu.llm.test_library import idle, until
from tests.support.models import tiny_models

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}

#: Searches of transformers, by the names it gives its parameters.
SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 2, "max_new_tokens": 1},
    {"num_beams": 3, "max_new_tokens": 20},
    {"num_beams": 4, "max_new_tokens": 30, "length_penalty": 0.0},
    {"num_beams": 4, "max_new_tokens": 30, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 5, "max_new_tokens": 25, "length_penalty": -1.0, "early_stopping": "never"},
    {"num_beams": 3, "max_new_tokens": 40, "length_penalty": 1.0, "early_stopping": "never"},
    {"num_beams": 8, "max_new_tokens": 12, "ignore_eos": True},
]


def prompt_of(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(4, 384, size=length)]


@lru_cache
def reference(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    # Else it warns of what sampling would do with them.
    model.generation_config.temperature = model.generation_config.top_p = None
    model.generation_config.top_k = None
    return model


def expected(
    folder: Path, prompt: list[int], search: dict[str, Any]
) -> list[tuple[list[int], float]]:
    """Tokens and score of each beam that transformers returns, best first."""
    model = reference(folder)
    asked = dict(search)
    if asked.pop("ignore_eos", False):
        asked["eos_token_id"] = None
        model.generation_config.eos_token_id = None
    else:
        model.generation_config.eos_token_id = [tiny_models.EOS, tiny_models.OTHER_EOS]
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            num_return_sequences=search["num_beams"],
            return_dict_in_generate=True,
            output_scores=True,
            **asked,
        )
    beams = []
    for ids, indices in zip(found.sequences.tolist(), found.beam_indices.tolist(), strict=True):
        length = sum(index >= 0 for index in indices)
        beams.append(ids[len(prompt) : len(prompt) + length])
    return list(zip(beams, found.sequences_scores.tolist(), strict=True))


def params_of(search: dict[str, Any]) -> BeamSearchParams:
    asked = dict(search)
    width, most = asked.pop("num_beams"), asked.pop("max_new_tokens")
    return BeamSearchParams(beam_width=width, max_tokens=most, **asked)


def check(beams: list[Beam], references: list[tuple[list[int], float]]) -> None:
    assert [beam.token_ids for beam in beams] == [tokens for tokens, _ in references]
    scores = [score for _, score in references]
    assert [beam.score for beam in beams] == pytest.approx(scores, rel=1e-6, abs=1e-4)
    assert scores == sorted(scores, reverse=True)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that likes to end, at each of its two end-of-sequence tokens."""
    from tests.support.text import tokenizers as tokenizers_for_tests

    folder = tmp_path_factory.mktemp("ending")
    tiny_models.make("llama", folder, seed=3, vocab_size=24)
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    return folder


@pytest.mark.parametrize("options", [{}, {"page_size": 2}, {"prefix_caching": False}])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_beams_equal_those_of_transformers(
    family: str, options: dict[str, Any], folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    async with AsyncLLM(folder, **OPTIONS, **options) as llm:
        for length, search in zip((1, 7, 33, 60, 100, 15, 16), SEARCHES, strict=True):
            prompt = prompt_of(length)
            beams = await llm.beam_search(prompt, params_of(search))
            check(beams, expected(folder, prompt, search))
        await idle(llm)


async def test_beams_that_end_equal_those_of_transformers(ending: Path) -> None:
    async with AsyncLLM(ending, **OPTIONS) as llm:
        ended = 0
        for search in SEARCHES:
            prompts = [[n, n + 1, n + 2] for n in range(4, 20, 3)]
            found = await asyncio.gather(
                *(llm.beam_search(prompt, params_of(search)) for prompt in prompts)
            )
            for prompt, beams in zip(prompts, found, strict=True):
                check(beams, expected(ending, prompt, search))
                for beam in beams:
                    at_end = beam.token_ids[-1] in (tiny_models.EOS, tiny_models.OTHER_EOS)
                    stops = at_end and not search.get("ignore_eos", False)
                    assert (beam.finish_reason is FinishReason.STOP) == stops
                    ended += stops
        assert ended > 50
        await idle(llm)


async def test_stop_tokens_end_beams_as_further_ends_of_transformers(ending: Path) -> None:
    async with AsyncLLM(ending, **OPTIONS) as llm:
        stops = (9, 11)
        params = BeamSearchParams(beam_width=4, max_tokens=20, stop_token_ids=stops)
        ends = [tiny_models.EOS, tiny_models.OTHER_EOS, *stops]
        search = {"num_beams": 4, "max_new_tokens": 20, "eos_token_id": ends}
        reasons = set()
        for first in range(4, 20):
            beams = await llm.beam_search([first, 6], params)
            check(beams, expected(ending, [first, 6], search))
            for beam in beams:
                last = beam.token_ids[-1]
                assert beam.stop_reason == (last if last in stops else None)
                assert (beam.finish_reason is FinishReason.STOP) == (last in ends)
                reasons.add(beam.stop_reason)
        assert {None, *stops} == reasons


async def test_full_pages_are_not_computed_again(folder_of: Callable[[str], Path]) -> None:
    async with AsyncLLM(folder_of("llama"), **OPTIONS, page_size=4) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
        before = llm.stats.step_tokens.total
        beams = await llm.beam_search(prompt_of(203), params)
        computed = llm.stats.step_tokens.total - before
        # The prompt once, and then at most a page of each beam for each token.
        assert computed <= 203 + 3 * 4 * 12
        assert all(len(beam.token_ids) == 12 for beam in beams)


async def test_the_best_beam_of_one_is_greedy(folder_of: Callable[[str], Path]) -> None:
    async with AsyncLLM(folder_of("llama"), **OPTIONS) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2)
        answer = await llm.generate(prompt_of(30), greedy)
        [beam] = await llm.beam_search(
            prompt_of(30), BeamSearchParams(beam_width=1, max_tokens=20, logprobs=2)
        )
        assert (beam.text, beam.token_ids) == (answer.text, answer.token_ids)
        assert answer.logprobs is not None
        assert beam.logprobs is not None
        assert len(beam.logprobs) == len(answer.logprobs)
        for entry, other in zip(beam.logprobs, answer.logprobs, strict=True):
            assert entry.token_id == other.token_id
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in other.top]
        assert beam.logprob == pytest.approx(sum(e.logprob for e in beam.logprobs))
        assert beam.usage.prompt_tokens == 30
        assert beam.usage.completion_tokens == len(beam.token_ids)


async def test_a_search_counts_as_one_request(folder_of: Callable[[str], Path]) -> None:
    async with AsyncLLM(folder_of("llama"), **OPTIONS) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
        await llm.beam_search(prompt_of(30), params)
        assert llm.stats.finished["length"] == sum(llm.stats.finished.values()) == 1
        assert llm.stats.prompt_tokens == 30


async def test_cancelling_leaves_nothing_behind(folder_of: Callable[[str], Path]) -> None:
    async with AsyncLLM(folder_of("llama"), **OPTIONS) as llm:
        endless = BeamSearchParams(beam_width=4, max_tokens=500, ignore_eos=True)
        task = asyncio.create_task(llm.beam_search(prompt_of(50), endless))
        await until(lambda: llm.stats.generation_tokens > 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)
        assert llm.stats.finished["abort"] == 1
        late = SchedulingParams(deadline_ms=100)
        with pytest.raises(DeadlineExceeded):
            await llm.beam_search(prompt_of(50), endless, late)
        await idle(llm)
        assert llm.stats.finished["deadline"] == 1
        before = llm.stats.generation_tokens
        task = asyncio.create_task(llm.beam_search(prompt_of(50), endless))
        await until(lambda: llm.stats.generation_tokens > before)
    with pytest.raises(EngineDead):
        await task


async def test_a_search_pins_its_prompt_or_is_short_lived(folder_of: Callable[[str], Path]) -> None:
    async with AsyncLLM(folder_of("llama"), **OPTIONS) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
        await llm.beam_search(prompt_of(50), params, SchedulingParams(cache_ttl_s=0))
        assert llm.stats.pins == llm.stats.pages_pinned == 0
        await llm.beam_search(prompt_of(50), params, SchedulingParams(cache_ttl_s=60))
        assert llm.stats.pages_pinned >= 50 // llm.limits.page_size
        with pytest.raises(BadRequest, match="cache_ttl_s"):
            await llm.beam_search(prompt_of(50), params, SchedulingParams(cache_ttl_s=4000))


async def test_searches_go_on_while_the_queue_is_full(folder_of: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"max_num_seqs": 2, "max_waiting": 2}
    async with AsyncLLM(folder_of("llama"), **OPTIONS, **options) as llm:
        params = BeamSearchParams(beam_width=5, max_tokens=10)
        alone = await llm.beam_search(prompt_of(20), params)
        busy = SamplingParams(max_tokens=60, ignore_eos=True)
        before = llm.stats.generation_tokens
        search = asyncio.create_task(llm.beam_search(prompt_of(20), params))
        await until(lambda: llm.stats.generation_tokens > before)
        others = [asyncio.create_task(llm.generate([5], busy)) for _ in range(2)]
        again = await search
        assert [beam.token_ids for beam in again] == [beam.token_ids for beam in alone]
        await asyncio.gather(*others, return_exceptions=True)


async def test_what_cannot_be_searched_is_refused(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(BadRequest, match="beam_width"):
        BeamSearchParams(beam_width=0)
    with pytest.raises(BadRequest, match="temperature"):
        BeamSearchParams(beam_width=2, temperature=0.5)
    with pytest.raises(BadRequest, match="stop_token_ids"):
        BeamSearchParams(beam_width=2, stop_token_ids=tuple(range(9)))
    with pytest.raises(BadRequest, match="early_stopping"):
        BeamSearchParams(beam_width=2, early_stopping="always")  # type: ignore[arg-type]
    async with AsyncLLM(folder_of("llama"), **OPTIONS) as llm:
        with pytest.raises(BadRequest) as caught:
            await llm.beam_search([5] * 10, BeamSearchParams(beam_width=2, max_tokens=5000))
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(BadRequest, match="empty"):
            await llm.beam_search([], BeamSearchParams(beam_width=2))


def test_without_an_event_loop(folder_of: Callable[[str], Path]) -> None:
    with LLM(folder_of("llama"), **OPTIONS) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=5)
        one = llm.beam_search("Hello", params)
        many = llm.beam_search(["Hello", "Good day"], params)
        assert len(one) == len(many) + 1 == 3
        # In a batch of another size the last bits of a score may differ.
        assert [beam.token_ids for beam in many[0]] == [beam.token_ids for beam in one]
        assert [beam.score for beam in many[0]] == pytest.approx([beam.score for beam in one])
