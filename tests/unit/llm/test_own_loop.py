"""An AsyncLLM belongs to the event loop that it was started on, and says so elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.types import TokenDelta

SHORT = SamplingParams(max_tokens=1)


async def stream(llm: AsyncLLM) -> list[TokenDelta]:
    return [delta async for delta in llm.stream("a", SHORT)]


async def submit(llm: AsyncLLM) -> int:
    return llm.submit([5], SHORT, Collector())


CALLS: dict[str, Callable[[AsyncLLM], Coroutine[Any, Any, Any]]] = {
    "generate": lambda llm: llm.generate("a", SHORT),
    "stream": stream,
    "submit": submit,
    "embed": lambda llm: llm.embed([[5], [6]]),
    "prepare": lambda llm: llm.prepare(SamplingParams(bad_words=("a",))),
}


async def test_calls_from_another_loop_or_none() -> None:
    async with AsyncLLM(device="sim", max_model_len=64) as llm:
        for call in CALLS.values():
            with pytest.raises(RuntimeError, match="started on another event loop"):
                await asyncio.to_thread(asyncio.run, call(llm))
        with pytest.raises(RuntimeError, match="for synchronous code"):
            await asyncio.to_thread(llm.submit, [5], SHORT, Collector())
        assert (llm.stats.waiting, llm.stats.running, llm.num_reserved) == (0, 0, 0)
        assert (await llm.generate("a", SHORT)).usage.completion_tokens == 1
        # What only reads may be read from anywhere.
        assert await asyncio.to_thread(lambda: llm.limits.max_model_len) == 64
