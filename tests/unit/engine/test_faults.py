"""What goes wrong inside the engine: who is told, who goes on, and what is left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from asyncllm.engine.engine import Engine
from asyncllm.engine.policy import Aged, Fair, Policy, Ranked
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.errors import EngineDead, PolicyError, StepError
from asyncllm.types import SamplingParams, SchedulingParams
from tests.support.engine.fake_executor import CharDetokenizer, FakeExecutor, ListSink
from tests.support.engine.scheduling import limits
from tests.unit.engine.test_engine import alphabet, idle, running

POISON = 666


class Failing(Aged):
    """Raises for the requests of one tenant, from a certain call on."""

    def __init__(self, error: Exception | float, after: int = 0):
        self.error = error
        self.after = after
        self.calls = 0

    def rank(self, request: Ranked, remaining: int) -> float:
        if request.tenant == "bad":
            self.calls += 1
            if self.calls > self.after:
                if isinstance(self.error, Exception):
                    raise self.error
                return self.error
        return super().rank(request, remaining)


class BadAccount(Fair):
    def account(self, request: Ranked) -> Any:
        return 1 if request.tenant == "bad" else request.tenant


def engine_with(policy: Policy, executor: FakeExecutor, **changes: Any) -> Engine:
    lim = limits(vocab_size=1000, **changes)
    return Engine(lim, executor, Scheduler.create(lim, policy), lambda *_: CharDetokenizer())


# -- steps that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 4, 8])
@pytest.mark.parametrize("gap", [0.0, 0.004])
async def test_of_nine_requests_only_the_one_that_makes_steps_fail_ends(
    bad: int, gap: float, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(step=0.001, lim=limits(vocab_size=1000, max_num_seqs=16)) as (
        engine,
        executor,
    ):
        executor.poison = {POISON}
        sinks = [ListSink() for _ in range(9)]
        for i, sink in enumerate(sinks):
            prompt = [1, 2, POISON] if i == bad else [i, i, i]
            engine.add(prompt, SamplingParams(max_tokens=12), sink)
            await asyncio.sleep(gap)
        async with asyncio.timeout(5):
            await asyncio.gather(*(sink.over.wait() for sink in sinks))
        for i, sink in enumerate(sinks):
            if i == bad:
                assert isinstance(sink.error, StepError)
                assert "planted" not in str(sink.error)
            else:
                assert sink.error is None
                assert sink.text == "defghijklmno", "as if nothing had happened"
        await idle(engine)
        assert 2 <= len(executor.failed) <= 2 * 5 + 2, "a failure cuts the suspects in two"
        assert engine.stats.errors["step"] == 1
        assert engine.stats.finished["length"] == 8
    assert any("planted" in r.getMessage() for r in caplog.records if r.levelno == logging.ERROR)


async def test_two_causes_among_many_are_both_found() -> None:
    lim = limits(vocab_size=1000, max_num_seqs=32, num_pages=256)
    async with running(step=0.001, lim=lim) as (engine, executor):
        executor.poison = {POISON}
        sinks = [ListSink() for _ in range(24)]
        for i, sink in enumerate(sinks):
            prompt = [POISON] if i in (3, 17) else [i]
            engine.add(prompt, SamplingParams(max_tokens=8), sink)
        async with asyncio.timeout(5):
            await asyncio.gather(*(sink.over.wait() for sink in sinks))
        assert [i for i, sink in enumerate(sinks) if sink.error] == [3, 17]


async def test_a_step_that_fails_once_costs_nobody_anything() -> None:
    async with running(step=0.001) as (engine, executor):
        executor.fail_steps = {3}
        sinks = [ListSink() for _ in range(5)]
        for i, sink in enumerate(sinks):
            engine.add([i] * 3, SamplingParams(max_tokens=10), sink)
        late = ListSink()
        await asyncio.sleep(0.004)
        engine.add([9], SamplingParams(max_tokens=3), late)
        async with asyncio.timeout(5):
            await asyncio.gather(*(sink.over.wait() for sink in (*sinks, late)))
        assert [sink.text for sink in sinks] == ["defghijklm"] * 5
        assert late.text == "bcd"
        await idle(engine)


async def test_steps_that_always_fail_end_everybody_in_the_end() -> None:
    async with running() as (engine, executor):
        executor.fail_steps = set(range(1000))
        sinks = [ListSink() for _ in range(6)]
        for sink in sinks:
            engine.add([1, 2], SamplingParams(max_tokens=3), sink)
        async with asyncio.timeout(5):
            await asyncio.gather(*(sink.over.wait() for sink in sinks))
        assert all(isinstance(sink.error, StepError) for sink in sinks)
        await idle(engine)


async def test_suspects_may_be_aborted_while_they_are_tried() -> None:
    async with running(step=0.002) as (engine, executor):
        executor.poison = {POISON}
        sinks = [ListSink() for _ in range(6)]
        ids = [
            engine.add([POISON if i == 5 else i], SamplingParams(max_tokens=30), sink)
            for i, sink in enumerate(sinks)
        ]
        await executor.has_failed.wait()
        for id in ids[:3]:
            engine.abort(id)
        async with asyncio.timeout(5):
            await asyncio.gather(*(sink.over.wait() for sink in sinks[3:]))
        assert [sink.error is None for sink in sinks[3:]] == [True, True, False]
        await idle(engine)


# -- policies that raise -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [Failing(RuntimeError("planted")), Failing(float("nan")), BadAccount()]
)
async def test_a_policy_that_fails_on_arrival_refuses_that_request(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with(policy, FakeExecutor(alphabet))
    engine.start()
    for _ in range(3):
        with pytest.raises(PolicyError) as caught:
            engine.add([1], SamplingParams(), ListSink(), SchedulingParams(tenant="bad"))
        assert "planted" not in str(caught.value)
    assert (engine.stats.waiting, engine.stats.running) == (0, 0)
    good = ListSink()
    engine.add([1], SamplingParams(max_tokens=3), good)
    await good.over.wait()
    assert good.text == "bcd"
    assert any(record.exc_info for record in caplog.records), "the traceback is in the log"
    await idle(engine)
    await engine.aclose()


async def test_a_policy_that_fails_on_a_deadline_that_cannot_be_met_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request is ranked to see what is ahead of it, before it is in the queue."""
    monkeypatch.setattr(Forecast, "least", lambda *_: 1e9)
    engine = engine_with(Failing(RuntimeError("planted")), FakeExecutor(alphabet))
    engine.start()
    bad = SchedulingParams(tenant="bad", deadline_ms=1000.0)
    with pytest.raises(PolicyError):
        engine.add([1], SamplingParams(), ListSink(), bad)
    good = ListSink()
    engine.add([1], SamplingParams(max_tokens=3), good)
    await good.over.wait()
    await idle(engine)
    assert engine._scheduler.backlog.num_waiting == 0
    await engine.aclose()


@pytest.mark.parametrize("after", [1, 2, 3])
async def test_a_policy_that_fails_later_ends_that_request_alone(after: int) -> None:
    """Prompts that compete for a step are ranked at each one."""
    policy = Failing(RuntimeError("planted"), after)
    engine = engine_with(policy, FakeExecutor(alphabet, 0.001), max_num_batched_tokens=8)
    engine.start()
    bad, good = ListSink(), [ListSink(), ListSink()]
    params = SamplingParams(max_tokens=4)
    engine.add([1] * 30, params, good[0])
    engine.add([2] * 40, params, bad, SchedulingParams(tenant="bad"))
    engine.add([3] * 35, params, good[1])
    async with asyncio.timeout(5):
        await asyncio.gather(*(sink.over.wait() for sink in (bad, *good)))
    assert isinstance(bad.error, PolicyError)
    assert [sink.error for sink in good] == [None, None]
    assert engine.stats.errors["policy"] == 1
    await idle(engine)
    await engine.aclose()


# -- the scheduler itself ----------------------------------------------------------------------


def raising(method: str, halfway: Callable[[Any], None]) -> type[Scheduler]:
    def raise_(self: Scheduler, *args: Any) -> Any:
        halfway(self)
        raise RuntimeError("planted")

    return type("Raising", (Scheduler,), {method: raise_})


@pytest.mark.parametrize("method", ["plan", "apply"])
async def test_whatever_the_scheduler_raises_everybody_is_told(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(scheduler: Any) -> None:
        scheduler.batch.running.clear()
        scheduler._admission = None  # every later call raises, too

    lim = limits(vocab_size=1000)
    executor = FakeExecutor(alphabet, 0.001)
    scheduler = raising(method, spoil).create(lim, Fair())
    engine = Engine(lim, executor, scheduler, lambda *_: CharDetokenizer())
    engine.start()
    sinks = [ListSink() for _ in range(3)]
    for sink in sinks:
        engine.add([1], SamplingParams(max_tokens=5), sink)
    async with asyncio.timeout(5):
        await asyncio.gather(*(sink.over.wait() for sink in sinks))
    for sink in sinks:
        assert isinstance(sink.error, EngineDead)
        assert "planted" not in str(sink.error)
    assert "planted" in caplog.text, "with its traceback"
    assert "internal error" in await engine.stopped()
    with pytest.raises(EngineDead):
        engine.add([1], SamplingParams(), ListSink())
    await engine.aclose()
    assert engine.stats.waiting == 0


async def test_adding_is_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (engine, _executor):

        def planted(*_: object) -> None:
            raise RuntimeError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "add", planted)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="planted"):
                    engine.add([1], SamplingParams(), ListSink(), SchedulingParams(deadline_ms=1e5))
        assert engine.stats.waiting == 0
        good = ListSink()
        engine.add([1], SamplingParams(max_tokens=2), good)
        await good.over.wait()
        await idle(engine)
