"""A run of the real model, with its real times, replays to identical plans."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.__main__ import main
from asyncllm.engine.policy import Aged
from asyncllm.engine.recording.trace_file import Trace
from asyncllm.lab.replay.verify import verify
from asyncllm.types import SchedulingParams


async def talk(llm: AsyncLLM, client: int) -> None:
    """A chat of some turns; some clients hang up in the middle of an answer."""
    rng = random.Random(client)
    messages = [{"role": "user", "content": "Hello! Tell me what you can do."}]
    params = SamplingParams(seed=client, max_tokens=rng.choice([8, 40]), stop=("zebra", "\n\n"))
    scheduling = SchedulingParams(
        tenant=f"key-{client % 3}", priority=client % 2, cache_salt=str(client % 2)
    )
    for turn in range(3):
        await asyncio.sleep(rng.random() / 20)
        text = ""
        async with aclosing(llm.stream(messages, params, scheduling)) as answer:
            async for delta in answer:
                text += delta.text
                if (client + turn) % 5 == 0:
                    break
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And then? " * rng.randint(1, 20)},
        ]


@pytest.mark.parametrize(
    "options", [{}, {"page_size": 4, "host_kv_gib": 0.01, "policy": Aged(), "steps_in_flight": 1}]
)
async def test_a_real_run_replays_to_the_same_plans(
    tmp_path: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "run.trace")
    async with AsyncLLM(
        device="cpu",
        cpu_threads=1,
        trace=path,
        max_model_len=512,
        kv_cache_tokens=768,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        **options,
    ) as llm:
        await asyncio.gather(*(talk(llm, client) for client in range(12)))
        stats = llm.stats

    replayed = verify(Trace.read(path))
    assert replayed.mismatch is None
    assert replayed.workload.ended == "the engine was closed"
    assert replayed.figures.num_requests == 36
    assert replayed.figures.num_steps == stats.steps
    assert replayed.figures.cached_tokens == stats.cached_tokens > 0
    assert stats.finished["abort"] > 0

    assert main(["replay", path, "--what-if", "budget=32", "--what-if", "policy=fcfs"]) == 0
    out = capsys.readouterr().out
    assert "all plans are the same" in out
    assert "policy=fcfs" in out
