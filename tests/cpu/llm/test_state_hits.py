"""Prefix hits of a real model with recurrent layers, at every depth, are exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncllm import AsyncLLM, BeamSearchParams, Completion, SamplingParams
from asyncllm.executor.memory import limits
from tests.support.server.polling import pages_are_released

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "page_size": 4}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)


def words(start: int, count: int) -> list[int]:
    return [4 + (start * 37 + i * i * 7 + i) % 90 for i in range(count)]


def same(completion: Completion, expected: Completion) -> None:
    assert completion.token_ids == expected.token_ids
    for entry, other in zip(completion.logprobs or (), expected.logprobs or (), strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("few", [False, True], ids=["many slots", "few slots"])
async def test_answers_are_those_of_an_engine_without_a_cache(
    few: bool, folder_of: Callable[[str], Path]
) -> None:
    """Prompts that leave a common path at every depth, next turns, and equal prompts at once."""
    folder = folder_of("qwen3_5")
    options = {**OPTIONS, "max_num_seqs": 1 if few else 8, "prefill_chunk": 48}
    base = words(0, 150)
    prompts = [[*base[:depth], *words(depth, 9)] for depth in (150, *range(5, 150, 23))]
    async with (
        AsyncLLM(folder, **options) as llm,
        AsyncLLM(folder, **OPTIONS, prefix_caching=False) as plain,
    ):
        expected = await plain.generate(prompts, PARAMS)
        for prompt, answer in zip(prompts, expected, strict=True):
            same(await llm.generate(prompt, PARAMS), answer)
        for completion, answer in zip(await llm.generate(prompts, PARAMS), expected, strict=True):
            same(completion, answer)
        chat, found = [*prompts[0], *expected[0].token_ids], 0
        for turn in range(3):
            completion = await llm.generate(chat, PARAMS)
            same(completion, await plain.generate(chat, PARAMS))
            found += completion.usage.cached_tokens
            chat += [*completion.token_ids, *words(turn, 20)]
        new = words(77, 120)
        again, answer = await llm.generate([new] * 4, PARAMS), await plain.generate(new, PARAMS)
        for completion in again:
            same(completion, answer)
        beams = BeamSearchParams(beam_width=3, max_tokens=6)
        found_beams = await llm.beam_search(prompts[0], beams)
        expected_beams = await plain.beam_search(prompts[0], beams)
        assert [beam.token_ids for beam in found_beams] == [
            beam.token_ids for beam in expected_beams
        ]
        if not few:
            assert found >= 3 * 130
            assert sum(completion.usage.cached_tokens for completion in again) >= 3 * 104
            assert llm.stats.states_used > 10
        await pages_are_released(llm)
        assert llm.stats.books_healed == 0


async def test_wrong_drafts_leave_nothing_in_what_a_prefix_finds(
    folder_of: Callable[[str], Path],
) -> None:
    """A, then B, then A again, and their next turns. Prompts repeat themselves, so that tokens are
    drafted from them, nearly all of which are wrong."""
    folder = folder_of("qwen3_5")
    a, b = words(0, 20) * 6, [*words(0, 20) * 3, *words(5, 20) * 3]
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 6}
    async with (
        AsyncLLM(folder, **OPTIONS, max_num_seqs=8, speculative_config=ngram) as llm,
        AsyncLLM(folder, **OPTIONS, prefix_caching=False) as plain,
    ):
        params = msgspec.structs.replace(PARAMS, max_tokens=20)
        for turn in range(2):
            expected = await plain.generate([a, b], params)
            for prompt, answer in zip((a, b, a), (*expected, expected[0]), strict=True):
                same(await llm.generate(prompt, params), answer)
            a, b = (
                [*prompt, *answer.token_ids, *words(turn, 9)]
                for prompt, answer in zip((a, b), expected, strict=True)
            )
        assert llm.stats.states_used >= 4
        await pages_are_released(llm)
        assert llm.stats.books_healed == 0


async def test_what_comes_back_from_the_hosts_memory_is_exact(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats that the device has neither pages nor states for, at every depth and in storms."""
    folder, base = folder_of("qwen3_5"), words(0, 110)
    monkeypatch.setattr(limits, "LEAST_CHECKPOINTS", 0)
    options = {**OPTIONS, "max_num_seqs": 2, "prefill_chunk": 48, "max_model_len": 240}
    options |= {"kv_cache_tokens": 480, "host_kv_gib": 0.01}
    chats = [[*base[:depth], *words(depth, 60)] for depth in range(0, 110, 11)]
    async with (
        AsyncLLM(folder, **options) as llm,
        AsyncLLM(folder, **OPTIONS, prefix_caching=False) as plain,
    ):
        assert llm.stats.states_total == 10
        for turn in range(3):
            expected = await plain.generate(chats, PARAMS)
            if turn == 1:
                completions = list(await llm.generate(chats, PARAMS))
            else:
                completions = [await llm.generate(chat, PARAMS) for chat in chats]
            for completion, answer in zip(completions, expected, strict=True):
                same(completion, answer)
            chats = [
                [*chat, *completion.token_ids, *words(turn, 5)]
                for chat, completion in zip(chats, completions, strict=True)
            ]
        stats = llm.stats
        assert stats.states_on_host > 10
        assert stats.host_cached_tokens > 500
        await pages_are_released(llm)
        assert stats.books_healed == 0
