"""The line about throughput: right while the engine is busy, and none while it is not."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.engine.stats import EngineStats
from asyncllm.server.throughput_log import Throughput, log_throughput


def test_rates_are_those_of_the_interval() -> None:
    stats = EngineStats(pages_total=200)
    throughput = Throughput(stats, 100.0)

    def line(now: float) -> str | None:
        found = throughput.line(now)
        return None if found is None else found[0]

    assert line(110.0) is None, "nothing has happened"
    stats.running, stats.waiting, stats.pages_held = 3, 2, 50
    stats.prompt_tokens, stats.generation_tokens = 12_000, 500
    stats.admitted_tokens, stats.cached_tokens = 10_000, 2500
    assert line(120.0) == (
        "running 3, waiting 2, prompts 1,200.0 tok/s, generated 50.0 tok/s, "
        "KV cache 25% in use, prefix cache hits 25%"
    )
    assert line(130.0) == (
        "running 3, waiting 2, prompts 0.0 tok/s, generated 0.0 tok/s, "
        "KV cache 25% in use, prefix cache hits -"
    ), "a step that hangs is no reason to be silent"
    stats.generation_tokens += 20
    stats.running = stats.waiting = stats.pages_held = 0
    last = line(132.0)
    assert last is not None
    assert last.startswith("running 0, waiting 0, prompts 0.0 tok/s, generated 10.0 tok/s")
    assert line(142.0) is None


async def test_what_a_server_logs_of_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "asyncllm.server.throughput_log")
    async with AsyncLLM(device="sim", sim_profile="h200-0.6b") as llm:
        reporting = asyncio.create_task(log_throughput(llm.stats, 0.02))
        prompt, params = list(range(1, 321)), SamplingParams(max_tokens=40, ignore_eos=True)
        for _ in range(2):
            await llm.generate(prompt, params)
        await asyncio.sleep(0.1)
        busy = len(caplog.records)
        await asyncio.sleep(0.1)
        reporting.cancel()
        assert llm.stats.admitted_tokens == 640
    lines = [record.getMessage() for record in caplog.records]
    assert lines
    assert len(lines) == busy, "silent when idle"
    assert lines[-1].startswith("running 0, waiting 0")
    assert any("prefix cache hits 95%" in line for line in lines), "304 of 320 the second time"
