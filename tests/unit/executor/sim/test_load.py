"""The real engine on the simulated device, which refuses any plan that mixes up KV."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.executor.sim import virtual_time

pytestmark = pytest.mark.slow


class Outcome(NamedTuple):
    """Tokens of each request (None: it was aborted), and what the engine counted."""

    answers: list[list[int] | None]
    preemptions: int
    cached_tokens: int
    host_pages_used: int
    seconds: float


async def load(seed: int, num_requests: int, **options: Any) -> Outcome:
    """Prompts that share prefixes, arriving within seconds; some give up."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    bases = [[rng.randrange(5, 2000) for _ in range(rng.randrange(1, 900))] for _ in range(5)]

    async def one(llm: AsyncLLM, request: int) -> list[int] | None:
        base = rng.choice(bases)
        own = [rng.randrange(5, 2000) for _ in range(rng.choice([0, 0, 1, 30, 300]))]
        prompt = base[: rng.randrange(1, len(base) + 1)] + own
        params = SamplingParams(seed=request, max_tokens=rng.choice([1, 2, 20, 300, 600]))
        patience = rng.choice([0.3, 1.0, None, None, None, None, None, None])
        await asyncio.sleep(rng.random() * 5)
        with suppress(TimeoutError):
            return (await asyncio.wait_for(llm.generate(prompt, params), patience)).token_ids
        return None

    options = {"sim_profile": "h200-8b", "max_model_len": 2048, "max_num_seqs": 32, **options}
    began = loop.time()
    async with AsyncLLM(device="sim", **options) as llm:
        answers = await asyncio.gather(*(one(llm, request) for request in range(num_requests)))
        stats, seconds = llm.stats, loop.time() - began
        await asyncio.sleep(1)  # for steps and copies that were still under way
        assert stats.running == stats.waiting == stats.pages_held == 0
    return Outcome(answers, stats.preemptions, stats.cached_tokens, stats.host_pages_used, seconds)


@cache
def with_room() -> Outcome:
    return virtual_time.run(load(1, 150))


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 16, "host_kv_gib": 2},
        {"page_size": 4, "host_kv_gib": 0.2, "steps_in_flight": 1},
        {"page_size": 32, "prefix_caching": False, "max_num_batched_tokens": 64},
    ],
)
def test_everything_finishes_in_a_tenth_of_the_memory(options: dict[str, Any]) -> None:
    tight = virtual_time.run(load(1, 150, kv_cache_tokens=2048, **options))
    assert tight.preemptions > 0
    assert (tight.cached_tokens > 0) == options.get("prefix_caching", True)
    assert (tight.host_pages_used > 0) == ("host_kv_gib" in options)

    roomy = with_room()
    assert roomy.preemptions == 0
    both = [(a, b) for a, b in zip(tight.answers, roomy.answers, strict=True) if a and b]
    assert len(both) > 100
    assert all(a == b for a, b in both), "memory decides when, and not what"
    assert roomy.seconds < tight.seconds


def test_the_same_load_twice_is_the_same() -> None:
    options = {"kv_cache_tokens": 4096, "host_kv_gib": 1}
    first, second = (virtual_time.run(load(2, 100, **options)) for _ in range(2))
    assert first == second
