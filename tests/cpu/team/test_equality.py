"""Several ranks say what one rank says, whatever is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncllm import AsyncLLM, BeamSearchParams, SamplingParams
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.executor import worker
from tests.cpu.llm import test_constraints_engine, test_structured_engine
from tests.cpu.llm.test_parity import expect_short_outputs
from tests.support.models.reference import GREEDY, NEW_TOKENS, answers, check
from tests.support.server.polling import pages_are_released
from tests.support.team.ranks import peers, plant

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}

#: How ranks may run without any token changing.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("qwen3", {"tp": 2}),
    "two, host tier, recurrent states": (
        "qwen3_5",
        {"tp": 2, "kv_cache_tokens": 640, "page_size": 4, "host_kv_gib": 0.01, "prefill_chunk": 64},
    ),
    "four, preempting": (
        "qwen3_moe",
        {"tp": 4, "kv_cache_tokens": 480, "page_size": 2, "max_model_len": 270},
    ),
    "two, host tier, chunks": (
        "llama",
        {"tp": 2, "kv_cache_tokens": 640, "page_size": 4, "host_kv_gib": 0.01, "prefill_chunk": 64},
    ),
}


@pytest.mark.parametrize("mode", MODES)
async def test_greedy_tokens_and_logprobs_equal_transformers(
    mode: str, folder_of: Callable[[str], Path]
) -> None:
    family, options = MODES[mode]
    folder = folder_of(family)
    async with AsyncLLM(folder, **OPTIONS, **options) as llm:
        assert len(peers()) == options["tp"] - 1
        if "preempting" in mode:
            expect_short_outputs(llm)
        longest = llm.limits.max_model_len - NEW_TOKENS
        expected = [answer for answer in answers(folder) if len(answer.prompt) <= longest]
        for turn in range(10):
            together = await asyncio.gather(*(llm.generate(a.prompt, GREEDY) for a in expected))
            for completion, answer in zip(together, expected, strict=True):
                check(completion, answer)
            # On a busy machine pages are computed again while their copies are under way.
            if turn and ("host" not in mode or llm.stats.host_cached_tokens):
                break
        await pages_are_released(llm)
        if "host tier" not in mode:  # as in tests/cpu/llm/test_parity.py
            assert (llm.stats.preemptions > 0) == ("preempting" in mode)
        if "host" in mode:
            assert llm.stats.host_pages_used > 0
            assert llm.stats.host_cached_tokens > 0
    assert peers() == []


async def test_everything_that_can_be_asked() -> None:
    found = []
    for tp in (1, 2):
        async with AsyncLLM(**OPTIONS, tp=tp) as llm:
            found.append(await _everything(llm))
            await pages_are_released(llm)
    alone, together = found
    for name in ("sampled", "structured", "beams"):
        assert together[name] == alone[name], name
    for name in ("embedding", "logprobs", "prompt logprobs"):
        assert np.allclose(together[name], alone[name], atol=1e-4), name


async def _everything(llm: AsyncLLM) -> dict[str, Any]:
    prompt = "Once upon a time there was a little"
    scored = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, prompt_logprobs=2)
    completion = await llm.generate(prompt, scored)
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    beams = await llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=6))
    structured = await asyncio.gather(
        *(llm.generate(prompt, params) for params in test_structured_engine.asked())
    )
    return {
        "sampled": await test_constraints_engine.answers(llm, together=True),
        "structured": [one.token_ids for one in structured],
        "beams": [beam.token_ids for beam in beams],
        "embedding": await llm.embed(prompt),
        "logprobs": [entry.logprob for entry in completion.logprobs],
        "prompt logprobs": [e.logprob for e in completion.prompt_logprobs if e is not None],
    }


async def test_what_is_cancelled_leaves_nothing() -> None:
    async with AsyncLLM(device="cpu", cpu_threads=1, tp=2) as llm:
        long = SamplingParams(max_tokens=1000, ignore_eos=True)
        for _ in range(3):
            tasks = [asyncio.create_task(llm.generate(f"{i} and", long)) for i in range(8)]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        collector = Collector()
        llm.submit([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True), collector)
        assert len((await collector.whole()).token_ids) == 4
        await pages_are_released(llm)
        assert llm.stats.running == 0


@pytest.mark.parametrize("late", [0, 1])
async def test_a_step_may_be_done_later_on_one_rank(
    late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs; on CPUs each step is done once it is launched."""
    with monkeypatch.context() as patch:
        if late == 0:
            patch.setattr(worker, "_done", lambda step: False)
        else:
            program = "import asyncllm.executor.worker as worker\nworker._done = lambda step: False"
            plant(program, tmp_path, patch)
        async with asyncio.timeout(60), AsyncLLM(device="cpu", tp=2) as llm:
            prompts = ["The", "1, 2, 3,", "What is 23 + 45?"]
            params = SamplingParams(max_tokens=9, ignore_eos=True)
            done = await asyncio.gather(*(llm.generate(prompt, params) for prompt in prompts))
            assert [len(completion.token_ids) for completion in done] == [9, 9, 9]
