"""``dp=2`` in Python: two processes with the demo model."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from asyncllm import AsyncLLM
from asyncllm.engine.policy import POLICIES
from asyncllm.errors import BadRequest, ContextLengthExceeded, EngineDead, ModelError
from asyncllm.llm.replicas.engine import ReplicatedEngine
from asyncllm.llm.replicas.link import pack_error, unpack_error
from asyncllm.types import SamplingParams
from asyncllm.types.beam_search import BeamSearchParams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from asyncllm.types import FinishReason

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="replicas need Linux")

T = TypeVar("T")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hello"}]


def replicas() -> list[int]:
    """The process ids."""
    found: list[int] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if any("replica_worker" in word for word in child.cmdline()):
                found.append(child.pid)
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def last_reason(llm: AsyncLLM, prompt: str) -> FinishReason | None:
    reason = None
    async with aclosing(llm.stream(prompt, LONG)) as deltas:
        async for delta in deltas:
            reason = delta.finish_reason
    return reason


@pytest.mark.timeout(180)
async def test_two_replicas_do_what_one_engine_does() -> None:
    options: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "kv_cache_tokens": 8192}
    async with AsyncLLM(**options) as one, AsyncLLM(**options, dp=2) as two:
        words = SamplingParams(temperature=0.0, max_tokens=4, bad_words=("the",), logprobs=1)
        for params in (GREEDY, words):
            for prompt in ("Once upon a time", CHAT, [5, 6, 7]):
                expected = await one.generate(prompt, params)
                found = await two.generate(prompt, params)
                assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
                assert found.finish_reason is expected.finish_reason
        prompts = [f"Number {i}" for i in range(12)]
        batches = [await llm.generate(prompts, GREEDY) for llm in (one, two)]
        assert [a.text for a in batches[0]] == [a.text for a in batches[1]]
        vectors, others = [await llm.embed(["a", "b"]) for llm in (one, two)]
        assert np.allclose(vectors, others, atol=1e-5)
        beams = BeamSearchParams(beam_width=2, max_tokens=4)
        searches = [await llm.beam_search("Once", beams) for llm in (one, two)]
        assert [b.text for b in searches[0]] == [b.text for b in searches[1]]

        with pytest.raises(ContextLengthExceeded):
            await two.generate([5] * 3000, GREEDY)
        with pytest.raises(BadRequest, match="logit_bias"):
            await two.generate("a", SamplingParams(logit_bias={10**6: 1.0}))
        with pytest.raises(BadRequest, match="dp"):
            two.aiohttp_app()

        # A replica is killed: what has begun fails, the rest moves, and it comes back.
        victim, other = replicas()
        streams = [asyncio.ensure_future(last_reason(two, f"Stream {i}")) for i in range(4)]
        cancelled = asyncio.ensure_future(two.generate("Cancelled", LONG))
        await until(lambda: two.stats.generation_tokens > 200)
        cancelled.cancel()
        os.kill(victim, signal.SIGKILL)
        waiting = [asyncio.ensure_future(two.generate(f"Wait {i}", GREEDY)) for i in range(6)]
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, EngineDead)]
        assert len(failed) == 2
        assert re.search(r"replica \d was killed by SIGKILL", str(failed[0]))
        assert all(answer.text for answer in await asyncio.gather(*waiting))
        await until(lambda: len(replicas()) == 2)
        assert other in replicas()
        engine = two._own.engine
        assert isinstance(engine, ReplicatedEngine)
        assert engine._requests.all() == []
    assert not replicas()


async def test_a_replica_that_cannot_load_says_why() -> None:
    policy = POLICIES["fcfs"]()
    with pytest.raises(BadRequest, match="policy"):
        AsyncLLM(dp=2, policy=policy)
    llm = AsyncLLM(device="cpu", kv_cache_tokens=10**9, dp=2)
    with pytest.raises(ModelError, match=r"at most kv_cache_tokens=\d+"):
        await llm.start()
    await llm.aclose()
    assert not replicas()


def test_a_loop_may_be_run_by_one_thread_after_another() -> None:
    llm = AsyncLLM(device="cpu", cpu_threads=1, dp=2)
    with asyncio.Runner() as runner:

        def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(lambda: runner.run(work())).result()

        run(llm.start)
        try:
            assert run(lambda: llm.generate("1, 2, 3,", GREEDY)).text.startswith(" 4, ")
        finally:
            run(llm.aclose)
    assert not replicas()


def test_errors_cross_as_they_are() -> None:
    error = ContextLengthExceeded(10, 20)
    found = unpack_error(pack_error(error))
    assert isinstance(found, ContextLengthExceeded)
    assert (found.message, found.param, found.code) == (error.message, error.param, error.code)
    assert str(found) == str(error)
