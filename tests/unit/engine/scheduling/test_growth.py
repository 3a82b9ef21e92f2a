"""Sequences that grow in a cache that cannot hold all of them at their ends."""

from __future__ import annotations

import numpy as np

from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.engine.policy import Aged
from asyncllm.executor.sim.executor import resolve_sim
from asyncllm.models.spec import read_spec
from asyncllm.types import SamplingParams
from tests.support.engine.scheduling import expect_outputs, scheduler, sequence
from tests.unit.engine.scheduling.test_order import Driver
from tools.bench_policies.hostile import grow
from tools.bench_policies.load import serve


def run_until_admitted(ages: list[int]) -> int:
    """How many sequences of 8 and then 120 tokens enter, if they come at these steps."""
    sched = scheduler(
        Aged(), num_pages=74, page_size=4, max_model_len=128, max_num_seqs=8, max_decode_steps=1
    )
    expect_outputs(sched, 120.0)
    driver = Driver(sched)
    for step in range(max(ages) + 1):
        for id in [id for id, age in enumerate(ages) if age == step]:
            sched.add(sequence(id, 8, max_tokens=120), 0.0)
        driver.step()
    return len(driver.admitted)


def test_who_will_end_later_takes_the_pages_of_who_ends_before() -> None:
    """The cache holds two sequences of full length, and three of different ages."""
    assert run_until_admitted([0, 0, 0]) == 2
    assert run_until_admitted([0, 0, 104]) == 3


def test_certain_lengths_are_never_admitted_to_be_preempted() -> None:
    sched = scheduler(num_pages=40, page_size=4, max_model_len=128, max_num_seqs=8)
    driver = Driver(sched)
    params = SamplingParams(max_tokens=56, ignore_eos=True)
    for id in range(8):
        sched.add(sequence(id, 8, max_tokens=56, params=params), 0.0)
    driver.run()
    assert sorted(driver.admitted) == list(range(8))
    assert sched.departures.num_preemptions == 0


def test_clients_that_leave_early_hold_no_room_for_long() -> None:
    """Each may fill the cache; others enter beside it when it is known that few do."""
    sched = scheduler(
        num_pages=40, page_size=4, max_model_len=128, max_num_seqs=8, max_decode_steps=1
    )
    driver = Driver(sched)
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    requests = [sequence(id, 8, max_tokens=120, params=params) for id in range(40)]
    for seq in requests:
        sched.add(seq, 0.0)
    running: list[int] = []
    for _ in range(20):
        for _ in range(6):
            driver.step()
        running.append(len(sched.batch.running))
        sched.finish(next(iter(sched.batch.running.values())), 0.0)
    assert running[:3] == [1, 1, 1]
    assert running[-3:] == [2, 2, 2]


def test_no_stream_stands_still_for_long_while_many_grow() -> None:
    """It was 30 s, with 83 preemptions and 3,531 tokens/s, when 256 tokens were expected."""
    hostile = grow()
    config = EngineConfig(
        device="sim", sim_profile="h200-8b", kv_cache_tokens=hostile.kv_cache_tokens
    )
    limits, cost = resolve_sim(config, read_spec(demo.path()))
    figures = serve(hostile.load, limits, cost, Aged())
    assert np.max(figures.itl) < 5.0
    assert figures.num_preemptions < 50
    assert figures.throughput > 3400
