"""Pages and slots are counted whenever the engine becomes idle, and healed if some are lost."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from asyncllm.engine.cache.state_slots import StateSlots
from asyncllm.types import SamplingParams
from tests.support.engine.fake_executor import ListSink
from tests.support.engine.scheduling import limits
from tests.unit.engine.test_engine import idle, running

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.engine.engine import Engine
    from asyncllm.engine.scheduling.scheduler import Scheduler

PROMPT = list(range(1, 40))
NUM_SLOTS = limits().max_num_seqs


async def complete(engine: Engine) -> str:
    sink = ListSink()
    engine.add(PROMPT, SamplingParams(max_tokens=5), sink)
    await sink.over.wait()
    await until_checked(engine)
    return sink.text


async def until_checked(engine: Engine) -> None:
    """The engine was idle since its last step."""
    for _ in range(1000):
        if not engine._busy:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it is still busy")


def lose_a_page(scheduler: Scheduler) -> None:
    scheduler.cache._pages.take_one()


def free_a_page_twice(scheduler: Scheduler) -> None:
    scheduler.cache._pages.give_back([scheduler.cache._pages._free[0]])


def free_a_cached_page(scheduler: Scheduler) -> None:
    root = next(iter(scheduler.cache._tree._roots.values()))
    scheduler.cache._pages.give_back([next(iter(root.children.values())).page])


def lock_a_page_for_ever(scheduler: Scheduler) -> None:
    tree = scheduler.cache._tree
    root = next(iter(tree._roots.values()))
    tree.lock_one(next(iter(root.children.values())))


def count_wrongly(scheduler: Scheduler) -> None:
    scheduler.cache._tree.num_cached += 1


def pin_wrongly(scheduler: Scheduler) -> None:
    scheduler.cache.pins.num_pages += 100


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler.batch._free.pop()


def lose_a_state(scheduler: Scheduler) -> None:
    states = scheduler.cache.states
    assert isinstance(states, StateSlots)
    states.take()


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_state,
        lose_a_page,
        free_a_page_twice,
        free_a_cached_page,
        lock_a_page_for_ever,
        count_wrongly,
        pin_wrongly,
        lose_a_slot,
    ],
)
async def test_damaged_books_are_healed(
    damage: Callable[[Scheduler], None], caplog: pytest.LogCaptureFixture
) -> None:
    lim = limits(num_states=20)
    async with running(lim=lim) as (engine, _):
        scheduler, stats = engine._scheduler, engine.stats
        text = await complete(engine)
        assert (stats.books_healed, stats.pages_cached > 0) == (0, True)
        assert not caplog.records
        damage(scheduler)
        assert scheduler.leak_check.mismatch() is not None
        assert await complete(engine) == text, "until then, it goes on as it can"
        assert stats.books_healed == 1
        [record] = caplog.records
        assert record.levelno == logging.ERROR
        assert "the KV books do not balance" in record.message
        cache = scheduler.cache
        assert scheduler.leak_check.mismatch() is None
        assert cache.num_free == cache.num_pages
        assert sorted(cache._pages._free) == list(range(cache.num_pages))
        assert scheduler.backlog.num_free_slots == NUM_SLOTS
        checks = stats.books_checks
        assert await complete(engine) == text
        assert await complete(engine) == text
        assert (stats.books_checks, stats.books_healed) == (checks + 2, 1)
        assert stats.pages_cached > 0, "pages are cached again"


async def test_sound_books_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(step=0.001) as (engine, _):
        cache = engine._scheduler.cache
        monkeypatch.setattr(cache, "reset", None)  # to call it would end the engine
        for count in range(1, 4):
            sinks = [ListSink() for _ in range(8)]
            ids = [engine.add(PROMPT, SamplingParams(max_tokens=9), sink) for sink in sinks]
            await asyncio.sleep(0.002 * count)
            for request_id in ids[::2]:
                engine.abort(request_id)
            await asyncio.gather(*(sink.over.wait() for sink in sinks[1::2]))
            await until_checked(engine)
            await idle(engine)
            assert (engine.alive, engine.stats.books_checks) == (True, count)
        assert cache.num_cached > 0


async def test_an_engine_that_has_done_nothing_is_not_checked() -> None:
    async with running() as (engine, _):
        sink = ListSink()
        engine.abort(engine.add(PROMPT, SamplingParams(max_tokens=5), sink))
        await asyncio.sleep(0.01)
        assert engine.stats.books_checks == 0


async def test_the_time_from_an_abort_until_its_pages_are_free_is_measured() -> None:
    lim = limits(vocab_size=1000, max_num_seqs=1)
    async with running(step=0.02, lim=lim) as (engine, executor):
        scheduler, freed = engine._scheduler, engine.stats.cancel_to_free
        running_id, waiting_id = (
            engine.add(PROMPT, SamplingParams(max_tokens=20), ListSink()) for _ in range(2)
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert executor.in_flight
        engine.abort(waiting_id)
        assert (sum(freed.counts), freed.total < 0.01) == (1, True), "it had nothing"
        engine.abort(running_id)
        assert sum(freed.counts) == 1, "a step in flight has a row of it"
        assert scheduler.cache.num_in_use > 0
        await until_checked(engine)
        assert sum(freed.counts) == 2
        assert 0.0 < freed.total < 5.0
        assert scheduler.cache.num_in_use == 0
