"""The simulated device: how long steps and copies take, and what is sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncllm.errors import EngineDead
from asyncllm.executor.sim import virtual_time
from asyncllm.executor.sim.executor import SimExecutor
from asyncllm.executor.sim.sampler import SimSampler
from asyncllm.wire.messages import NO_TOKEN, TO_DEVICE, TO_HOST, Admit, decode_result, pack, unpack
from tests.support.engine.sim_driver import (
    COST,
    EOS,
    LIMITS,
    PAGE,
    VOCAB,
    Driver,
    admit,
    pages_of,
    row_params,
    simulate,
    two_full_pages,
)


def seconds(start: int, length: int) -> float:
    """Of a step with one row that samples."""
    return COST.seconds(np.array([start]), np.array([length]), 1)


def test_a_step_takes_its_time_and_the_next_begins_when_it_ends() -> None:
    async def test(driver: Driver) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = driver.send([(0, 0, 6)], pages_of(0, [0, 1, 2]), (admit(0, [5] * 6),))
        second = driver.send([(0, 6, 1)])
        one = decode_result(await first)
        assert loop.time() - began == pytest.approx(seconds(0, 6))
        assert not second.done()
        two = decode_result(await second)
        assert loop.time() - began == pytest.approx(seconds(0, 6) + seconds(6, 1))
        assert (one.t_launch, two.t_launch) == (began, began)
        assert two.t_done - one.t_done == pytest.approx(seconds(6, 1))

        await asyncio.sleep(1)
        late = await driver.step([(0, 7, 1)])
        assert late.t_done - late.t_launch == pytest.approx(seconds(7, 1))

    simulate(test)


def test_times_are_in_the_clock_it_is_given() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        driver = Driver(LIMITS, COST)
        driver.executor = SimExecutor(LIMITS, COST, clock=lambda: loop.time() + 500)
        result = await driver.step([(0, 0, 6)], pages_of(0, [0, 1]), (admit(0, [5] * 6),))
        assert result.t_launch == pytest.approx(virtual_time.START + 500)
        assert result.t_done == pytest.approx(loop.time() + 500)

    virtual_time.run(main())


COPY = COST.copy_seconds(1, PAGE)


def test_copies_run_beside_steps_and_are_acknowledged_once() -> None:
    async def test(driver: Driver) -> None:
        await two_full_pages(driver)
        result = await driver.step([(0, 8, 1)], copies=[(TO_HOST, 0, 3), (TO_HOST, 1, 4)])
        [(step, took)] = result.copied
        assert step == 1
        assert took == pytest.approx(2 * COPY)
        assert result.t_done - result.t_launch == pytest.approx(seconds(8, 1))
        assert (await driver.step([(0, 9, 1)])).copied == ()

    simulate(test)


def test_a_plan_without_rows_waits_for_all_copies() -> None:
    async def test(driver: Driver) -> None:
        loop = asyncio.get_running_loop()
        await two_full_pages(driver)
        nothing = await driver.step([])
        assert nothing.t_done == nothing.t_launch

        began = loop.time()
        result = await driver.step([], copies=[(TO_HOST, 0, 3)])
        assert loop.time() - began == pytest.approx(COPY)
        [(step, took)] = result.copied
        assert step == 2
        assert took == pytest.approx(COPY)
        assert result.tokens == b""

    simulate(test)


def test_copies_of_one_direction_wait_for_each_other() -> None:
    async def test(driver: Driver) -> None:
        await two_full_pages(driver)
        await driver.step([], copies=[(TO_HOST, 0, 3), (TO_HOST, 1, 4)])
        first = driver.send([], copies=[(TO_DEVICE, 8, 3), (TO_HOST, 0, 5)])
        second = driver.send([], copies=[(TO_DEVICE, 9, 4)])
        one, two = decode_result(await first), decode_result(await second)
        assert one.t_done - one.t_launch == pytest.approx(COPY)
        assert two.t_done - two.t_launch == pytest.approx(2 * COPY)
        [(step, took)] = one.copied
        assert step == 2
        assert took == pytest.approx(2 * COPY), "both directions added up"
        [(step, took)] = two.copied
        assert step == 3
        assert took == pytest.approx(COPY)

    simulate(test)


def test_copies_longer_than_the_step_are_acknowledged_by_a_later_one() -> None:
    async def test(driver: Driver) -> None:
        await two_full_pages(driver)
        assert (await driver.step([(0, 8, 1)], copies=[(TO_HOST, 0, 3)])).copied == ()
        running = driver.send([(0, 9, 1)])
        waiting = driver.send([])
        assert decode_result(await running).copied == ()
        [(step, _)] = decode_result(await waiting).copied
        assert step == 1

    simulate(test, copy_bandwidth=1e7)


# -- tokens --------------------------------------------------------------------------------------


def test_tokens_depend_on_seed_and_position_only() -> None:
    async def test(driver: Driver) -> None:
        alone = await driver.generate([1, 2, 3], 12, seed=5)
        assert len(set(alone)) > 6
        assert all(0 <= token < VOCAB and token != EOS for token in alone)

        # In another slot, beside another sequence, in chunks, after other tokens.
        pages = pages_of(3, [20, 21]) + pages_of(4, [22, 23])
        both = (admit(3, [9, 9, 9, 9], seed=5), admit(4, [1, 2, 3], seed=6))
        assert await driver.tokens([(3, 0, 2), (4, 0, 2)], pages, both) == [NO_TOKEN, NO_TOKEN]
        out = [await driver.tokens([(4, 2, 1), (3, 2, 2)])]
        out += [await driver.tokens([(3, 4 + i, 1), (4, 3 + i, 1)]) for i in range(3)]
        assert [mine for mine, _ in out[1:]] == alone[2:5]
        assert out[0][1] == alone[1]
        assert [other for _, other in out[1:]] != alone[1:4]

    simulate(test)


def test_a_preempted_sequence_goes_on_as_it_would_have() -> None:
    async def test(driver: Driver) -> None:
        out = await driver.generate([1, 2, 3], 12, seed=5)
        known = [1, 2, 3, *out[:6]]
        back = Admit(2, pack(known), 3, row_params(seed=5))
        resumed = await driver.tokens([(2, 0, 9)], pages_of(2, [10, 11, 12]), (back,))
        resumed += await driver.tokens([(2, 9, 1)])
        assert resumed == out[6:8]

    simulate(test)


def first_end(seed: int, **params: Any) -> int:
    """The length of a sequence when its end is sampled; 4000 when that does not happen."""
    sampler = SimSampler(1, VOCAB, (EOS,))
    sampler.admit(0, row_params(seed=seed, **params))
    lengths = np.arange(1, 4000)
    [ends] = np.nonzero(sampler.sample(np.zeros_like(lengths), lengths) == EOS)
    return int(lengths[ends[0]]) if len(ends) else 4000


def test_sequences_end_by_themselves_but_not_before_min_tokens() -> None:
    ends = [first_end(seed, stop_ids=(EOS,)) for seed in range(200)]
    assert 400 < np.mean(ends) < 640
    assert min(ends) < 32
    assert max(ends) > 1500
    soon = int(np.argmin(ends))
    assert first_end(soon, stop_ids=(EOS,), min_length=ends[soon]) == ends[soon]
    assert first_end(soon, stop_ids=(EOS,), min_length=ends[soon] + 1) > ends[soon]
    assert first_end(soon) == 4000, "nothing stops it, so it does not end"


def test_a_users_stop_tokens_are_not_sampled() -> None:
    async def test(driver: Driver) -> None:
        plain = await driver.generate([1, 2, 3], 30, seed=5)
        changed = await driver.generate([1, 2, 3], 30, seed=5, stop_ids=tuple(plain[4:8]))
        assert not set(changed) & set(plain[4:8])
        kept = [i for i in range(30) if plain[i] not in plain[4:8]]
        assert [changed[i] for i in kept] == [plain[i] for i in kept]

    simulate(test)


def test_logprobs_are_returned_for_rows_that_want_them() -> None:
    async def test(driver: Driver) -> None:
        admits = (admit(0, [1], seed=1), admit(1, [1], seed=2, logprobs=3))
        pages = pages_of(0, [0]) + pages_of(1, [1])
        result = await driver.step([(0, 0, 1), (1, 0, 1)], pages, admits)
        [entry] = result.logprobs
        assert entry.row == 1
        assert entry.top_ids[0] == unpack(result.tokens)[1]
        assert len(set(entry.top_ids)) == len(entry.top_logprobs) == 3
        assert entry.sampled == pytest.approx(-np.log(VOCAB))

    simulate(test)


def test_closing_drops_steps_in_flight() -> None:
    async def test(driver: Driver) -> None:
        await two_full_pages(driver)
        running = driver.send([(0, 8, 1)])
        await driver.executor.close()
        for future in (running, driver.send([(0, 9, 1)])):
            with pytest.raises(EngineDead, match="engine closed"):
                await future

    simulate(test)
