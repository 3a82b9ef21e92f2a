"""The server collects fully when few requests would wait for it, and leaves no trace of itself."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable
from typing import Any

import pytest

from asyncllm import AsyncLLM
from asyncllm.config.server_config import ServerConfig
from asyncllm.server import garbage, run
from asyncllm.server.garbage import (
    FEW_REQUESTS,
    MOST,
    WORTH_GIVING_BACK,
    WORTHWHILE,
    collect_when_quiet,
)
from asyncllm.server.run import serve
from asyncllm.server.shutdown import Shutdown
from tests.support.server.fake_llm import FakeLLM

pytestmark = pytest.mark.usefixtures("freezing")


class Cycle:
    def __init__(self) -> None:
        self.me = self


def old_garbage() -> weakref.ref[Cycle]:
    """A cycle that only a full collection finds, after as many others as make one worthwhile."""
    cycle = Cycle()
    gc.collect(1)  # it is old now
    for _ in range(WORTHWHILE):
        gc.collect(1)
    return weakref.ref(cycle)


@pytest.mark.parametrize("num_requests", [FEW_REQUESTS, FEW_REQUESTS + 1])
async def test_garbage_is_collected_when_few_requests_run(num_requests: int) -> None:
    before = gc.get_threshold()
    collecting = asyncio.create_task(collect_when_quiet(lambda: num_requests, interval=0.01))
    await asyncio.sleep(0)
    assert gc.get_threshold() == (*before[:2], MOST)
    assert gc.get_freeze_count() > 0
    garbage = old_garbage()
    await asyncio.sleep(0.1)
    assert (garbage() is None) == (num_requests <= FEW_REQUESTS)
    collecting.cancel()
    await asyncio.wait([collecting])
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def test_collections_that_loading_turned_off_are_on_again() -> None:
    gc.disable()
    try:
        collecting = asyncio.create_task(collect_when_quiet(lambda: 0, interval=0.01))
        await asyncio.sleep(0)
        assert gc.isenabled()
        collecting.cancel()
        await asyncio.wait([collecting])
    finally:
        gc.enable()


async def test_nothing_is_collected_for_little() -> None:
    full = gc.get_stats()[2]["collections"]
    collecting = asyncio.create_task(collect_when_quiet(lambda: 0, interval=0.001))
    await asyncio.sleep(0.05)
    collecting.cancel()
    await asyncio.wait([collecting])
    assert gc.get_stats()[2]["collections"] == full + 1, "the one at the beginning"


async def test_the_server_process_does_so_while_it_serves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gc.get_threshold()
    shutdown = Shutdown(drain_seconds=1.0)
    monkeypatch.setattr(shutdown, "closing", lambda: None)  # else it would end this process
    asked: list[tuple[Any, ...]] = []

    def collect(*args: Any) -> Awaitable[None]:
        asked.append(args)
        return collect_when_quiet(*args)

    monkeypatch.setattr(run, "collect_when_quiet", collect)
    llm = FakeLLM()
    serving = asyncio.create_task(serve(llm, ServerConfig(port=0), shutdown))
    while "asyncllm is ready" not in capsys.readouterr().out:
        await asyncio.sleep(0.01)
        assert not serving.done()
    await asyncio.sleep(0.01)
    assert gc.get_threshold() == (*before[:2], MOST)
    [[num_requests, _]] = asked
    assert num_requests() == 0
    llm.stats.running, llm.stats.waiting = 1, FEW_REQUESTS
    assert num_requests() == FEW_REQUESTS + 1, "of the engine; one of HTTP may be thousands"
    llm.stats.running = llm.stats.waiting = 0
    shutdown.stop.set()
    assert await serving == 0
    assert gc.get_threshold() == before


async def test_the_library_freezes_what_is_loaded_and_changes_no_threshold() -> None:
    thresholds = gc.get_threshold()
    async with AsyncLLM(device="sim", sim_profile="h200-0.6b"):
        assert gc.get_threshold() == thresholds
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("enabled", [True, False])
async def test_loading_collects_where_collections_are_on(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[bool] = []
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    monkeypatch.setattr(gc, "collect", lambda: full.append(True))
    async with AsyncLLM(device="sim", sim_profile="h200-0.6b"):
        assert full == [True] * enabled
        assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("num_requests", [FEW_REQUESTS, FEW_REQUESTS + 1])
async def test_memory_of_large_answers_is_given_back(
    monkeypatch: pytest.MonkeyPatch, num_requests: int
) -> None:
    """When they were large enough together, and few requests would wait for it."""
    given_back = []
    monkeypatch.setattr(garbage, "give_memory_back", lambda: given_back.append(len(looks)))
    looks: list[int] = []

    def freed() -> int:
        looks.append(1)
        return WORTH_GIVING_BACK // 2

    task = asyncio.create_task(collect_when_quiet(lambda: num_requests, freed, 0.001))
    async with asyncio.timeout(10):
        while len(looks) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    assert given_back[:3] == ([2, 4, 6] if num_requests <= FEW_REQUESTS else [])


def test_giving_memory_back_takes_any_c_library() -> None:
    garbage.give_memory_back()
