"""A prompt that is preempted while something is read of each of its positions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.types import TokenDelta
from tests.cpu.llm.test_library import idle, until
from tests.cpu.llm.test_parity import expect_short_outputs


async def answer_of_a_preempted(
    folder: Path, prompt: list[int], params: SamplingParams
) -> TokenDelta:
    """The whole answer; what was computed before the preemption was not computed again."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "cpu_threads": 1,
        "prefill_chunk": 1,
        "page_size": 2,
        "kv_cache_tokens": 250,
    }
    async with AsyncLLM(folder, device="cpu", **options) as llm:
        expect_short_outputs(llm)
        # A stop string, for they must not look as if they were sure to become that long.
        endless = SamplingParams(max_tokens=100, ignore_eos=True, stop=("never there",))
        others = [asyncio.create_task(llm.generate([n] * 10, endless)) for n in (4, 5)]
        await until(lambda: llm.stats.generation_tokens >= 60)
        collector = Collector()
        id = llm.submit(prompt, params, collector)
        answer = await collector.whole()
        trace = llm.trace(id)
        assert trace is not None
        events = [(event.kind, event.b) for event in trace.events]
        assert ("preempted", 0) in events
        [first, *later] = [cached for kind, cached in events if kind == "admitted"]
        assert first == 0
        assert later
        assert max(later) > 0, "what was computed is not computed again"
        await asyncio.gather(*others)
        await idle(llm)
    return answer
