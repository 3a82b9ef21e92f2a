"""The engine against a fake executor: delivery, aborts, errors, overlap."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncllm.config import EngineLimits
from asyncllm.engine.engine import DELIVERIES_PER_TURN, Engine
from asyncllm.engine.policy import Fair
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.errors import AsyncLLMError, BadRequest, EngineDead, QueueFull, StepError
from asyncllm.types import FinishReason, SamplingParams, TokenDelta
from asyncllm.wire.messages import BAD_TOKEN, unpack
from tests.support.engine.fake_executor import CharDetokenizer, FakeExecutor, ListSink
from tests.support.engine.scheduling import limits

ROOMY = limits(vocab_size=1000)


def alphabet(position: int) -> int:
    return ord("a") + position % 26


@asynccontextmanager
async def running(
    script: Callable[[int], int] = alphabet, lim: EngineLimits | None = None, step: float = 0.0
) -> AsyncIterator[tuple[Engine, FakeExecutor]]:
    executor = FakeExecutor(script, step)
    lim = lim or limits(vocab_size=1000)
    scheduler = Scheduler.create(lim, Fair())
    engine = Engine(lim, executor, scheduler, lambda *_: CharDetokenizer())
    engine.start()
    try:
        yield engine, executor
    finally:
        await engine.aclose()


async def idle(engine: Engine) -> None:
    for _ in range(200):
        stats = engine.stats
        if not (stats.running or stats.waiting or stats.pages_held):
            assert stats.books_healed == 0
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not idle: {engine.stats}")


async def test_tokens_arrive_one_delta_a_step_and_all_is_given_back() -> None:
    async with running() as (engine, executor):
        sink = ListSink()
        engine.add([1, 2, 3], SamplingParams(max_tokens=5), sink)
        await sink.over.wait()
        assert sink.text == "defgh"
        assert len(sink.deltas) == 5
        assert sink.deltas[-1].finish_reason is FinishReason.LENGTH
        await idle(engine)
        assert executor.most_in_flight == 2
        assert executor.flushes >= 1


async def test_depth_one_gives_the_same_tokens() -> None:
    async with running(lim=limits(vocab_size=1000, steps_in_flight=1)) as (engine, executor):
        sink = ListSink()
        engine.add([1, 2, 3], SamplingParams(max_tokens=5), sink)
        await sink.over.wait()
        assert sink.text == "defgh"
        assert executor.most_in_flight == 1


async def test_a_stop_string_across_tokens_ends_the_sequence_without_it() -> None:
    async with running() as (engine, _executor):
        sink = ListSink()
        engine.add([1], SamplingParams(stop=("def",), max_tokens=20), sink)
        await sink.over.wait()
        assert sink.text == "bc"
        assert sink.deltas[-1].stop_reason == "def"
        assert sink.deltas[-1].finish_reason is FinishReason.STOP
        await idle(engine)
        assert engine.stats.finished["stop"] == 1


async def test_the_end_of_sequence_token_is_counted_but_not_shown() -> None:
    async with running(lambda position: 7 if position == 6 else ord("x")) as (engine, _executor):
        sink = ListSink()
        engine.add([1, 2, 3], SamplingParams(max_tokens=20), sink)
        await sink.over.wait()
        assert sink.text == "xxx"
        assert sink.token_ids == [120, 120, 120, 7]
        assert sink.deltas[-1].stop_reason is None


async def test_a_stop_token_is_named() -> None:
    async with running() as (engine, _executor):
        sink = ListSink()
        engine.add([1], SamplingParams(max_tokens=20, stop_token_ids=(ord("e"),)), sink)
        await sink.over.wait()
        assert (sink.text, sink.deltas[-1].stop_reason) == ("bcd", ord("e"))


async def test_abort_queued_and_running_gives_pages_back_within_a_step() -> None:
    async with running(lim=limits(vocab_size=1000, max_num_seqs=1), step=0.01) as (
        engine,
        executor,
    ):
        first, second = ListSink(), ListSink()
        one = engine.add([1], SamplingParams(max_tokens=50), first)
        two = engine.add([1], SamplingParams(max_tokens=50), second)
        await asyncio.sleep(0.05)
        assert engine.stats.waiting == 1
        engine.abort(two)
        engine.abort(two)
        assert engine.stats.waiting == 0
        engine.abort(one)
        steps = len(executor.plans)
        await idle(engine)
        assert len(executor.plans) == steps, "no step after the abort"
        seen = len(first.deltas)
        await asyncio.sleep(0.03)
        assert len(first.deltas) == seen
        assert engine.stats.finished["abort"] == 2


async def test_a_failed_step_fails_its_requests_only() -> None:
    async with running(step=0.005) as (engine, executor):
        executor.fail_steps = {1}
        first, second = ListSink(), ListSink()
        engine.add([1], SamplingParams(max_tokens=10), first)
        await first.over.wait()
        assert isinstance(first.error, StepError)
        engine.add([1], SamplingParams(max_tokens=10), second)
        await second.over.wait()
        assert second.error is None
        await idle(engine)
        assert engine.stats.finished["error"] == 1


async def test_a_row_without_finite_logits_fails_alone() -> None:
    async with running(lambda position: BAD_TOKEN if position == 4 else 97) as (engine, _executor):
        good, bad = ListSink(), ListSink()
        engine.add([1] * 10, SamplingParams(max_tokens=5), good)
        engine.add([1] * 3, SamplingParams(max_tokens=5), bad)
        await asyncio.gather(good.over.wait(), bad.over.wait())
        assert isinstance(bad.error, StepError)
        assert good.text == "aaaaa"
        await idle(engine)


async def test_a_dead_executor_fails_everyone() -> None:
    async with running(step=0.005) as (engine, executor):
        sink = ListSink()
        engine.add([1], SamplingParams(max_tokens=30), sink)
        await asyncio.sleep(0.02)
        executor.dead = True
        await sink.over.wait()
        assert isinstance(sink.error, EngineDead)
        assert not engine.alive
        with pytest.raises(EngineDead):
            engine.add([1], SamplingParams(), ListSink())


async def test_closing_fails_what_is_unfinished() -> None:
    sink = ListSink()
    async with running(step=0.005) as (engine, _executor):
        engine.add([1], SamplingParams(max_tokens=30), sink)
        await asyncio.sleep(0.01)
    assert isinstance(sink.error, EngineDead)


async def test_a_sink_that_raises_loses_its_own_request_only() -> None:
    class Broken(ListSink):
        def emit(self, delta: object) -> None:
            raise ValueError("planted")

        def fail(self, error: Exception) -> None:
            raise ValueError("planted")

    async with running() as (engine, _executor):
        good = ListSink()
        engine.add([1], SamplingParams(max_tokens=5), Broken())
        engine.add([1], SamplingParams(max_tokens=5), good)
        await good.over.wait()
        assert good.text == "bcdef"
        await idle(engine)
        assert engine.stats.finished["error"] == 1


async def test_a_stranger_cancelling_all_tasks_does_not_stop_the_engine() -> None:
    async with running(step=0.01) as (engine, _executor):
        sink = ListSink()
        engine.add([1], SamplingParams(max_tokens=10), sink)
        await asyncio.sleep(0.03)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await sink.over.wait()
        assert sink.error is None
        assert engine.alive


async def test_busy_time_is_what_the_executor_measured() -> None:
    async with running(step=0.002) as (engine, _executor):
        sink = ListSink()
        engine.add([1], SamplingParams(max_tokens=20), sink)
        await sink.over.wait()
        assert engine.stats.device_busy == pytest.approx(0.002 * engine.stats.steps)


async def test_a_sink_may_abort_its_own_request() -> None:
    async with running() as (engine, _executor):
        ids: list[int] = []

        class Quitter(ListSink):
            def emit(self, delta: object) -> None:
                engine.abort(ids[0])

        ids.append(engine.add([1], SamplingParams(max_tokens=1), Quitter()))
        await idle(engine)
        assert {how: n for how, n in engine.stats.finished.items() if n} == {"abort": 1}


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], SamplingParams(), "prompt"),
        ([1] * 64, SamplingParams(), "prompt"),
        ([1] * 10, SamplingParams(max_tokens=60), "max_tokens"),
        ([1000], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ([1, 2, -(2**31)], SamplingParams(), "prompt"),
        ([2**31, 1, 2], SamplingParams(), "prompt"),
        ([1, 2**64, 2], SamplingParams(), "prompt"),
        ([1, -(2**64), 2], SamplingParams(), "prompt"),
        ([1, 1000] * 20, SamplingParams(), "prompt"),
        ([1], SamplingParams(stop_token_ids=(1000,)), "stop_token_ids"),
        ([1] * 10, SamplingParams(min_tokens=60), "min_tokens"),
        ([1], SamplingParams(min_tokens=1, stop_token_ids=tuple(range(999))), "stop_token_ids"),
    ],
)
async def test_requests_that_can_never_be_served(
    prompt: list[int], params: SamplingParams, param: str
) -> None:
    async with running() as (engine, _executor):
        with pytest.raises(BadRequest) as caught:
            engine.add(prompt, params, ListSink())
        assert caught.value.param == param


@pytest.mark.parametrize("prompt", [[1, 2.0], [1, "2"], [None, 1], "text"])
async def test_a_prompt_is_made_of_integers(prompt: Any) -> None:
    async with running() as (engine, _executor):
        with pytest.raises(TypeError, match="integer"):
            engine.add(prompt, SamplingParams(), ListSink())
        assert engine.stats.waiting == 0


@pytest.mark.parametrize("prompt", [(0, 1, 999), range(3), array("i", [1, 2]), [True, np.int64(2)]])
async def test_any_sequence_of_integers_is_a_prompt(prompt: Any) -> None:
    async with running() as (engine, executor):
        sink = ListSink()
        engine.add(prompt, SamplingParams(max_tokens=1), sink)
        await sink.over.wait()
        [admit] = executor.plans[0].admits
        assert unpack(admit.tokens).tolist() == list(prompt)
        assert (admit.num_prompt, sink.text) == (len(prompt), chr(alphabet(len(prompt))))


async def test_the_queue_is_bounded_beyond_the_free_slots() -> None:
    lim = limits(vocab_size=1000, max_waiting=2, max_num_seqs=3)
    async with running(lim=lim) as (engine, _executor):
        for _ in range(5):
            engine.add([1], SamplingParams(max_tokens=2), ListSink())
        with pytest.raises(QueueFull) as caught:
            engine.add([1], SamplingParams(max_tokens=2), ListSink())
        assert caught.value.retry_after > 0
        assert isinstance(caught.value, AsyncLLMError)


async def test_a_turn_of_the_loop_delivers_no_more_than_its_share() -> None:
    """However many rows there are and however many requests come and go."""
    rows = 400
    roomy = {"num_pages": 16 * rows, "max_num_batched_tokens": 4 * rows, "max_waiting": 2 * rows}
    lim = limits(vocab_size=1000, max_num_seqs=rows, **roomy)
    async with running(lim=lim, step=0.001) as (engine, _):
        loop = asyncio.get_running_loop()
        params = SamplingParams(max_tokens=20)

        class Again(ListSink):
            """Replaced by another when it ends."""

            def emit(self, delta: TokenDelta) -> None:
                if delta.finish_reason is not None and engine.alive:
                    loop.call_soon(start)

        def start() -> None:
            engine.add([1, 2], params, Again())

        for i in range(rows):
            start()
            if i % 16 == 0:
                await asyncio.sleep(0.001)
        most = 0
        for _ in range(300):
            before = engine.stats.generation_tokens
            await asyncio.sleep(0)
            most = max(most, engine.stats.generation_tokens - before)
        assert engine.stats.running > DELIVERIES_PER_TURN
        assert 0 < most <= DELIVERIES_PER_TURN


async def test_results_that_arrive_together_are_delivered_in_turns_of_their_own() -> None:
    async with running(step=0.05) as (engine, executor), asyncio.timeout(5):
        sink = ListSink()
        engine.add([1, 2], SamplingParams(max_tokens=8), sink)
        for _ in range(10):
            await asyncio.sleep(0)
        assert executor.in_flight == 2
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)  # then both timers are due at once
        seen = set()
        for _ in range(10):
            await asyncio.sleep(0)
            seen.add(len(sink.deltas))
        assert seen == {0, 1, 2}
        await sink.over.wait()
        assert executor.most_in_flight == 2


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_sink_that_raises_takes_nothing_from_others(error: type[BaseException]) -> None:
    class Raising(ListSink):
        def emit(self, delta: TokenDelta) -> None:
            super().emit(delta)
            if len(self.text) == 4:
                raise error

    async with running() as (engine, _), asyncio.timeout(5):
        bad, last, longer = Raising(), ListSink(), ListSink()
        engine.add([1, 2, 3], SamplingParams(max_tokens=9), bad)
        engine.add([4, 5, 6], SamplingParams(max_tokens=4), last)
        engine.add([7, 8, 9], SamplingParams(max_tokens=9), longer)
        await asyncio.gather(*(sink.over.wait() for sink in (bad, last, longer)))
        assert isinstance(bad.error, StepError)
        assert (last.text, longer.text) == ("defg", "defghijkl")
        await idle(engine)
