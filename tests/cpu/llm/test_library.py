"""AsyncLLM inside a program: several engines, cancellation, embedding, and memory given back."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_aiohttp import AiohttpClient

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.errors import EngineDead, ModelError, NotReady
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.models.base import CausalLM
from asyncllm.types import FinishReason
from examples.embed_in_aiohttp import create_app

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
SUM = [{"role": "user", "content": "What is 27 + 45?"}]


def demo(**options: Any) -> AsyncLLM:
    return AsyncLLM(device="cpu", cpu_threads=1, **options)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


async def idle(llm: AsyncLLM) -> None:
    stats = llm.stats
    await until(lambda: not (stats.running or stats.waiting or stats.pages_held))


async def test_text_ids_and_messages_are_prompts() -> None:
    async with demo() as llm:
        answer = await llm.generate(SUM)
        assert "72" in answer.text
        assert answer.finish_reason is FinishReason.STOP
        text = await llm.generate("1, 2, 3,", GREEDY)
        ids = await llm.generate(await llm.encode("1, 2, 3,"), GREEDY)
        assert text == ids
        deltas = [delta async for delta in llm.stream("1, 2, 3,", GREEDY)]
        assert "".join(delta.text for delta in deltas) == text.text
        assert [token for delta in deltas for token in delta.token_ids] == text.token_ids
        assert deltas[-1].finish_reason is text.finish_reason
        both = await llm.generate(["1, 2, 3,", SUM], GREEDY)
        assert [answer.text for answer in both] == [text.text, answer.text]


async def test_two_engines_share_a_process() -> None:
    async with demo() as one, demo(steps_in_flight=1, page_size=4) as two:
        answers = await asyncio.gather(one.generate(SUM, GREEDY), two.generate(SUM, GREEDY))
        assert answers[0] == answers[1]


async def test_cancelling_the_task_cancels_the_request() -> None:
    async with demo() as llm:
        endless = SamplingParams(max_tokens=1500, ignore_eos=True)
        task = asyncio.create_task(llm.generate(SUM, endless))
        await until(lambda: llm.stats.running > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)
        stream = llm.stream(SUM, endless)
        await anext(stream)
        await stream.aclose()
        await idle(llm)
        assert llm.stats.finished["abort"] == 2
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await llm.generate(SUM, endless)
        await idle(llm)


def large_things() -> list[KVPool | CausalLM]:
    # By type(): isinstance() wakes up lazy objects among what the collector tracks.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), KVPool | CausalLM)]


async def test_closing_gives_everything_back() -> None:
    threads = set(threading.enumerate())
    before = {id(thing) for thing in large_things()}
    llm = await demo().start()
    large = [weakref.ref(thing) for thing in large_things() if id(thing) not in before]
    assert len(large) == 2
    unfinished = asyncio.create_task(llm.generate(SUM, SamplingParams(ignore_eos=True)))
    await asyncio.sleep(0.05)
    await llm.aclose()
    await llm.aclose()
    with pytest.raises(EngineDead):
        await unfinished
    with pytest.raises(EngineDead):
        await llm.generate(SUM)
    assert not llm.healthy
    gc.collect()
    assert not [ref for ref in large if ref() is not None]
    left = {thread for thread in threading.enumerate() if thread.name.startswith("asyncllm")}
    assert not left - threads


async def test_it_serves_nothing_before_it_started() -> None:
    llm = demo()
    assert llm.healthy
    assert not llm.ready
    with pytest.raises(NotReady):
        await llm.generate(SUM)


def executors() -> set[threading.Thread]:
    """The executor threads, other tests' engines included."""
    return {thread for thread in threading.enumerate() if thread.name == "asyncllm-executor"}


async def test_loading_can_be_cancelled() -> None:
    others = executors()
    seen: list[tuple[int, int]] = []

    def slow(done: int, total: int) -> None:
        seen.append((done, total))
        time.sleep(0.02)

    llm = AsyncLLM(device="cpu", cpu_threads=1, progress=slow)
    starting = asyncio.create_task(llm.start())
    await until(lambda: len(seen) > 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    done, total = seen[-1]
    assert done < total
    assert executors() <= others
    await llm.aclose()


async def test_errors_of_loading_are_raised_by_start() -> None:
    others = executors()
    with pytest.raises(ModelError, match="max_model_len"):
        await AsyncLLM(device="cpu", max_model_len=10**6).start()
    with pytest.raises(ModelError, match=r"kv_cache_tokens=\d+"):
        await AsyncLLM(device="cpu", kv_cache_tokens=10**9).start()
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="CUDA"):
            await AsyncLLM(device="cuda").start()
    assert executors() <= others


async def test_overrides_and_the_quantization_that_is_expected() -> None:
    overrides = {"max_position_embeddings": 128}
    async with demo(load_format="dummy", hf_overrides=overrides) as llm:
        assert llm.limits.max_model_len == 128
        phases = "import", "device", "weights", "kernels", "profile", "KV cache", "attention"
        assert [item.name for item in llm.startup.items] == [*phases, "graphs"]
    with pytest.raises(ModelError, match=r"quantization awq: .* not quantised") as error:
        await AsyncLLM(device="cpu", quantization="awq").start()
    assert error.value.param == "quantization"


async def test_dummy_weights_and_small_caches_serve() -> None:
    async with demo(load_format="dummy", kv_cache_tokens=256, max_num_seqs=4) as llm:
        assert llm.limits.max_model_len == 256
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        alone = await llm.generate("Hello", params)
        crowd = await asyncio.gather(*(llm.generate("Hello", params) for _ in range(6)))
        assert llm.stats.preemptions == 0, "so long they were sure to be, and admitted accordingly"
        assert all(answer.token_ids == alone.token_ids for answer in crowd)


async def test_mounted_in_an_application(aiohttp_client: AiohttpClient) -> None:
    client = await aiohttp_client(create_app())
    models = await (await client.get("/llm/v1/models")).json()
    assert models["data"][0]["id"] == "asyncllm-demo"
    reply = await client.post("/llm/v1/chat/completions", json={"messages": SUM})
    assert "72" in (await reply.json())["choices"][0]["message"]["content"]
    assert "olleh" in await (await client.get("/reverse/hello")).text()
