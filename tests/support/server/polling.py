"""Waiting for something that nobody announces."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm import AsyncLLM
    from tests.support.server.fake_llm import FakeLLM


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def until_idle(llm: FakeLLM) -> None:
    """Wait until nothing runs, waits, or has a place in the queue."""
    stats = llm.stats
    await until(lambda: stats.running == stats.waiting == llm.num_reserved == 0)


async def pages_are_released(llm: AsyncLLM) -> None:
    """Soon: a step in flight may have rows of requests that have ended."""
    await until(lambda: llm.stats.pages_held == 0, 60.0)
