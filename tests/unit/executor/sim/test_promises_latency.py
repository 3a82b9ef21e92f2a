"""Long prompts beside streams, on a simulated H200 with an 8B model: nobody is frozen."""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.executor.sim import virtual_time

pytestmark = pytest.mark.slow

NUM_STREAMS = 32
LONG = 8000
EVERY = 0.3
SECONDS = 9.0


class Scene:
    """Streams that generate all the time, and long prompts that want one token each."""

    def __init__(self, llm: AsyncLLM, context: int):
        self.llm = llm
        self.context = context
        self.random = random.Random(1)
        self.gaps: list[float] = []
        self.measuring = False

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(5, 2000) for _ in range(length)]

    async def time_to_first_token(self) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.llm.generate(self.prompt(LONG), SamplingParams(max_tokens=1, ignore_eos=True))
        return loop.time() - began

    async def stream(self) -> None:
        loop, last = asyncio.get_running_loop(), None
        params = SamplingParams(max_tokens=8000, ignore_eos=True)
        async for _ in self.llm.stream(self.prompt(self.context), params):
            now = loop.time()
            if last is not None and self.measuring:
                self.gaps.append(now - last)
            last = now

    async def play(self) -> tuple[list[float], list[float]]:
        """Times to the first token of long prompts: alone, and beside the streams."""
        alone = [await self.time_to_first_token() for _ in range(3)]
        streams = [asyncio.create_task(self.stream()) for _ in range(NUM_STREAMS)]
        await asyncio.sleep(2)
        self.measuring = True
        prompts = []
        for _ in range(int(SECONDS / EVERY)):
            prompts.append(asyncio.create_task(self.time_to_first_token()))
            await asyncio.sleep(EVERY)
        beside = await asyncio.gather(*prompts)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        return alone, list(beside)


@pytest.mark.parametrize("context", [64, 256, 600])
def test_long_prompts_do_not_stop_streams_and_are_hardly_slower(context: int) -> None:
    async def main() -> None:
        async with AsyncLLM(device="sim", sim_profile="h200-8b", max_model_len=16384) as llm:
            scene = Scene(llm, context)
            alone, beside = await scene.play()
        gaps = sorted(scene.gaps)
        assert gaps[int(0.99 * len(gaps))] <= 0.027, "the target of inter-token times"
        assert gaps[-1] <= 0.030, "no token waits much longer"
        assert statistics.median(beside) <= 1.35 * statistics.median(alone)
        assert max(beside) <= 1.5 * statistics.median(alone)

    virtual_time.run(main())


def test_a_tighter_target_is_kept() -> None:
    async def main() -> None:
        options: dict[str, Any] = {
            "sim_profile": "h200-8b",
            "max_model_len": 16384,
            "itl_target_ms": 13.0,
        }
        async with AsyncLLM(device="sim", **options) as llm:
            scene = Scene(llm, 256)
            await scene.play()
        gaps = sorted(scene.gaps)
        # Twice the time of decoding alone is always allowed; with these streams that is 13 ms.
        assert gaps[int(0.99 * len(gaps))] <= 0.015

    virtual_time.run(main())
