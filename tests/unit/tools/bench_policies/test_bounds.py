"""The bounds, on examples that are done by hand."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import numpy as np
import pytest

from asyncllm.engine.policy import POLICIES
from asyncllm.executor.sim.cost import H200, SimCost
from asyncllm.executor.sim.shape import SHAPES
from tests.support.engine.scheduling import limits
from tools.bench_policies.bounds import due_times, edf, prefill_work, srpt, total_work
from tools.bench_policies.load import Load, LoadRequest, serve

COST = SimCost(SHAPES["h200-8b"], H200, itemsize=2)


def test_srpt_by_hand() -> None:
    # 0-1: the first. 1-3: the second, which is shorter. 3-4: the third. Then the rest of the first.
    assert srpt([0.0, 1.0, 2.0], [5.0, 2.0, 1.0]) == [8.0, 2.0, 2.0]


def test_srpt_waits_for_arrivals() -> None:
    assert srpt([1.0, 10.0], [2.0, 3.0]) == [2.0, 3.0]
    assert srpt([], []) == []


def test_no_order_without_interruptions_has_a_smaller_mean() -> None:
    rng = random.Random(4)
    for _ in range(30):
        arrivals = sorted(rng.random() * 4 for _ in range(5))
        work = [rng.random() * 2 for _ in range(5)]
        best = min(sum(_flow(order, arrivals, work)) for order in permutations(range(5)))
        assert sum(srpt(arrivals, work)) <= best + 1e-9


def _flow(order: tuple[int, ...], arrivals: list[float], work: list[float]) -> list[float]:
    now, flow = 0.0, []
    for id in order:
        now = max(now, arrivals[id]) + work[id]
        flow.append(now - arrivals[id])
    return flow


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bound(policy: str) -> None:
    rng = random.Random(6)
    load = Load(
        "some",
        [
            LoadRequest(n / 20, rng.randrange(500, 4000), rng.randrange(1, 9), (0, n % 3))
            for n in range(60)
        ],
        block_tokens=128,
    )
    limited = limits(
        page_size=16,
        num_pages=20_000,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        prefill_chunk=8192,
    )
    work = prefill_work(load, COST, 16, 8192)
    bound = srpt([request.arrival for request in load.requests], work)
    ttft = serve(load, limited, COST, POLICIES[policy]()).ttft
    assert sum(bound) <= sum(ttft)
    assert sum(bound) > 0.3 * sum(ttft), "and it is no trivial bound"


def test_work_is_what_no_earlier_prompt_had() -> None:
    load = Load("two", [LoadRequest(0.0, 4096, 5, (1, 2)), LoadRequest(1.0, 4096, 5, (1, 2))], 2000)
    first, second = prefill_work(load, COST, 16, 8192)
    assert second < first / 20
    assert first == pytest.approx(COST.token_seconds * 4096, rel=0.2)
    with_output = total_work(load, COST, 16, 8192)
    assert first < with_output[0] < 1.1 * first


def test_a_request_is_due_so_early_that_its_tokens_can_follow() -> None:
    load = Load("one", [LoadRequest(2.0, 1000, 101, deadline=3.0)])
    [due] = due_times(load, COST, 8192)
    step = COST.seconds(np.array([1000]), np.array([1]), 1)
    assert 5.0 - 100 * step < due < 5.0 - 90 * step


def test_edf_by_hand() -> None:
    # All can be in time, but only if the third comes between the others.
    assert edf([0.0, 0.0, 1.0], [2.0, 3.0, 1.0], [9.0, 6.0, 3.0]) == [True] * 3
    # The long one is dropped for two short ones.
    assert edf([0.0, 0.0, 0.0], [4.0, 1.0, 1.0], [4.0, 4.5, 4.6]) == [False, True, True]
    assert edf([0.0], [2.0], [1.0]) == [False]


def test_edf_meets_as_many_as_possible_of_those_that_come_together() -> None:
    rng = random.Random(9)
    for _ in range(30):
        work = [0.1 + rng.random() for _ in range(6)]
        due = [rng.random() * 4 for _ in range(6)]
        assert sum(edf([0.0] * 6, work, due)) == _most(work, due)


def _most(work: list[float], due: list[float]) -> int:
    for count in range(len(work), 0, -1):
        for chosen in combinations(sorted(range(len(work)), key=due.__getitem__), count):
            done = 0.0
            if all((done := done + work[id]) <= due[id] for id in chosen):
                return count
    return 0
