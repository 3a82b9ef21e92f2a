"""Recurrent states on a GPU: in graphs with padding, beside batch mates, after other sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLM
from tests.gpu.test_graphs import answers, tokens, workload

pytestmark = pytest.mark.gpu

FAMILIES = ["qwen3_5", "lfm2", "granite_hybrid"]


@pytest.mark.parametrize("family", FAMILIES)
async def test_how_steps_are_made_up_does_not_show(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    """In float32: alone, batched, in chunks, preempted, with padded graphs and without graphs."""
    requests, folder = workload(17, temperature=0.0), folder_of(family)
    options: dict[str, Any] = {"dtype": "float32", "prefix_caching": False}
    expected = tokens(await answers(folder, requests, max_num_seqs=1, **options))
    for changed in (
        {"max_num_seqs": 32},
        {"cuda_graphs": False},
        {"prefill_chunk": 16, "max_decode_steps": 3},
        {"prefill_chunk": 37, "steps_in_flight": 1},
        {"kv_cache_tokens": 1024, "page_size": 4},
    ):
        assert tokens(await answers(folder, requests, **options, **changed)) == expected, changed


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_other_sequences_leave_does_not_show(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    """The same requests again and again in one engine, each time in other slots; some are aborted
    in between. States of prefixes are found from the second time on."""
    requests, folder = workload(13, temperature=0.0), folder_of(family)
    async with AsyncLLM(
        folder, device="cuda", dtype="float32", max_model_len=256, max_num_seqs=7
    ) as llm:

        async def run() -> list[list[int]]:
            done = await asyncio.gather(*(llm.generate(*request) for request in requests))
            return tokens(list(done))

        expected = await run()
        for turn in range(4):
            tasks = [asyncio.ensure_future(llm.generate(*r)) for r in reversed(requests)]
            await asyncio.sleep(0.01 * turn)
            for task in tasks:
                task.cancel()
            assert await run() == expected, turn
