"""Logprobs of prompts against transformers in float32, however the prompts are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncllm import AsyncLLM, Completion, SamplingParams
from asyncllm.engine.requests.mailbox import Mailbox
from asyncllm.errors import StepError
from asyncllm.types import FinishReason, PromptLogprob, TokenDelta
from tests.cpu.llm.test_library import idle, until
from tests.support.models.preempting import answer_of_a_preempted

LENGTHS = (1, 2, 16, 17, 100, 300)
TOP = 3
SCORE = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=TOP)
SCORE_AND_GO = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=TOP, logprobs=1)
PLAIN = SamplingParams(temperature=0.0, max_tokens=4)

#: How the engine may run without any number changing.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 1": {"prefill_chunk": 1},
    "chunks of 7": {"prefill_chunk": 7, "page_size": 4},
    "small steps": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "no overlap": {"steps_in_flight": 1, "prefix_caching": False},
}


def prompt_of(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(4, 384, size=length)]


@lru_cache
def logprobs_of(folder: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """float32 [tokens, vocab]: of what comes after each position."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits.log_softmax(-1)


def check(entries: Sequence[PromptLogprob | None] | None, folder: Path, prompt: list[int]) -> None:
    assert entries is not None
    assert entries[0] is None
    assert len(entries) == len(prompt)
    rows = logprobs_of(folder, tuple(prompt))
    for token, entry, row in zip(prompt[1:], entries[1:], rows, strict=False):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        surely, at_most = ((row > row[token] + shift).sum().item() for shift in (1e-4, -1e-4))
        assert surely < entry.rank <= max(at_most, 1)
        assert [lp for _, lp in entry.top] == pytest.approx(row.topk(TOP).values.tolist(), abs=1e-4)
        for id, logprob in entry.top:
            assert logprob == pytest.approx(row[id].item(), abs=1e-4)


@pytest.mark.parametrize(
    ("family", "mode"),
    [*(("llama", mode) for mode in MODES), ("gemma2", "chunks of 7"), ("opt", "default")],
)
async def test_they_equal_transformers(
    family: str, mode: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    options = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, **MODES[mode]}
    async with AsyncLLM(folder, **options) as llm:
        prompts = [prompt_of(length) for length in LENGTHS]
        plain = [await llm.generate(prompt, PLAIN) for prompt in prompts]
        for prompt, expected in zip(prompts, plain, strict=True):
            # All of it is cached by now, which must not matter.
            scored = await llm.generate(prompt, SCORE)
            check(scored.prompt_logprobs, folder, prompt)
            assert (scored.text, scored.token_ids) == ("", [])
            assert scored.finish_reason is FinishReason.LENGTH
            assert scored.usage.cached_tokens == 0
            both = await llm.generate(prompt, SCORE_AND_GO)
            check(both.prompt_logprobs, folder, prompt)
            assert both.token_ids == expected.token_ids
        # With each other and with others in the batch, some of them new to the cache.
        jobs = [(prompt, params) for prompt in prompts for params in (SCORE, SCORE_AND_GO, PLAIN)]
        new = [[5, *prompt[1:]] for prompt in prompts]
        jobs += [(prompt, params) for prompt in new for params in (PLAIN, SCORE_AND_GO)]
        answers = await asyncio.gather(*(llm.generate(*job) for job in jobs))
        for (prompt, params), answer in zip(jobs, answers, strict=True):
            if params is PLAIN:
                assert answer.prompt_logprobs is None
            else:
                check(answer.prompt_logprobs, folder, prompt)
        await idle(llm)


async def test_a_preempted_prompt_goes_on_where_it_was(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    answer = await answer_of_a_preempted(folder, prompt_of(60), SCORE_AND_GO)
    check(answer.prompt_logprobs, folder, prompt_of(60))


async def test_scoring_leaves_its_pages_to_the_cache(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    prompt = prompt_of(100)
    async with AsyncLLM(folder, device="cpu", dtype="float32", cpu_threads=1) as llm:
        scored = await llm.generate(prompt, SCORE)
        check(scored.prompt_logprobs, folder, prompt)
        again = await llm.generate(prompt, PLAIN)
        assert again.usage.cached_tokens == 99 // llm.limits.page_size * llm.limits.page_size
        await idle(llm)
        cached = llm.stats.pages_cached
        await llm.generate(prompt, SCORE)
        await idle(llm)
        assert llm.stats.pages_cached == cached, "the same pages are kept once"


async def test_they_come_once_and_before_the_first_token(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    prompt = prompt_of(100)
    options: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "prefill_chunk": 16}
    async with AsyncLLM(folder, device="cpu", **options) as llm:
        deltas = [delta async for delta in llm.stream(prompt, SCORE_AND_GO)]
        check(deltas[0].prompt_logprobs, folder, prompt)
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])
        assert sum(len(delta.token_ids) for delta in deltas) == 4
        assert all(len(d.logprobs or ()) == len(d.token_ids) for d in deltas)
        [only] = [delta async for delta in llm.stream(prompt, SCORE)]
        assert only.finish_reason is FinishReason.LENGTH
        check(only.prompt_logprobs, folder, prompt)


async def test_aborting_while_a_prompt_is_scored(folder_of: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "prefill_chunk": 1}
    async with AsyncLLM(folder_of("llama"), device="cpu", **options) as llm:
        task = asyncio.create_task(llm.generate(prompt_of(300), SCORE))
        await until(lambda: llm.stats.steps > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer: Completion = await llm.generate(prompt_of(20), SCORE)
        check(answer.prompt_logprobs, folder_of("llama"), prompt_of(20))


async def test_a_sink_that_raises_loses_its_own_request_only(
    folder_of: Callable[[str], Path],
) -> None:
    class Bad:
        error: Exception | None = None

        def emit(self, delta: TokenDelta) -> None:
            raise RuntimeError("planted")

        def fail(self, error: Exception) -> None:
            self.error = error

    async with AsyncLLM(folder_of("llama"), device="cpu", dtype="float32", cpu_threads=1) as llm:
        for params in (SCORE, SCORE_AND_GO, SamplingParams(max_tokens=0)):
            bad = Bad()
            llm.submit(prompt_of(30), params, bad)
            good = await llm.generate(prompt_of(40), SCORE)
            check(good.prompt_logprobs, folder_of("llama"), prompt_of(40))
            await until(lambda bad=bad: bad.error is not None)  # type: ignore[misc]
            assert isinstance(bad.error, StepError)
        await idle(llm)
        assert llm.stats.finished["error"] == 3


async def test_the_whole_context_can_be_scored(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    options: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "max_model_len": 100}
    async with AsyncLLM(folder, device="cpu", **options) as llm:
        answer = await llm.generate(prompt_of(100), SCORE)
        check(answer.prompt_logprobs, folder, prompt_of(100))
        nothing = await llm.generate(prompt_of(100), SamplingParams(max_tokens=0))
        assert (nothing.text, nothing.prompt_logprobs) == ("", None)


async def test_the_simulated_device_has_them_too() -> None:
    async with AsyncLLM(device="sim") as llm:
        prompt = (await llm.encode("Once upon a time there was a"))[:6]
        for params in (SCORE, SCORE_AND_GO):
            answer = await llm.generate(prompt, params)
            assert answer.prompt_logprobs is not None
            first, *others = answer.prompt_logprobs
            assert first is None
            assert [entry.token_id for entry in others if entry] == prompt[1:]
            assert all(entry and len(entry.top) == TOP for entry in others)


async def test_a_slow_reader_gets_them_with_the_first_tokens() -> None:
    mailbox = Mailbox()
    mailbox.emit(TokenDelta(prompt_logprobs=[None]))
    mailbox.emit(TokenDelta(text="a", token_ids=[1]))
    merged = await mailbox.get()
    assert (merged.prompt_logprobs, merged.text) == ([None], "a")
