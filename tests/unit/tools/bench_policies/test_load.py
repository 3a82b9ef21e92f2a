"""Loads on the simulated device, and bounds of what any scheduler can do."""

from __future__ import annotations

import random
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest

from asyncllm.engine.policy import POLICIES
from asyncllm.errors import BadRequest
from asyncllm.executor.sim.cost import H200, SimCost
from asyncllm.executor.sim.shape import SHAPES
from asyncllm.lab.replay.figures import Figures
from tests.support.engine.scheduling import limits
from tools.bench_policies.bounds import due_times, edf, prefill_work, srpt, total_work
from tools.bench_policies.hostile import HOSTILE, cached_turns, deadlines, interfere, preempt, wall
from tools.bench_policies.load import Load, LoadRequest, serve

COST = SimCost(SHAPES["h200-8b"], H200, itemsize=2)
#: Two conversations of blocks of 8 tokens, pages of 4; each turn comes when the one before is done.
CHATS = Load(
    "chats",
    [
        LoadRequest(0.0, 20, 3, (1, 2, 3)),  # the last block has 4 tokens: one page
        LoadRequest(1.0, 24, 3, (1, 2, 3)),  # the same block, complete
        LoadRequest(2.0, 24, 3, (1, 2, 4)),
        LoadRequest(3.0, 16, 3, (1, 2)),  # its last token is computed again
        LoadRequest(4.0, 16, 3, (2, 1)),  # the same blocks elsewhere are others
        LoadRequest(5.0, 18, 3),  # like no other
        LoadRequest(6.0, 18, 3),
        LoadRequest(7.0, 23, 3, (1, 2, 4)),
    ],
    block_tokens=8,
)
CACHED = [0, 20, 16, 12, 0, 0, 0, 20]


def run(load: Load, policy: str = "fair", **changes: Any) -> Figures:
    changed = {"num_pages": 1000, "max_model_len": 2000, "max_num_batched_tokens": 256, **changes}
    return serve(load, limits(**{"prefill_chunk": 256, **changed}), COST, POLICIES[policy]())


def test_prompts_share_the_pages_of_their_common_blocks() -> None:
    figures = run(CHATS)
    assert [record.num_cached for record in figures.records] == CACHED
    assert figures.cached_share == sum(CACHED) / sum(r.num_prompt for r in CHATS.requests)
    assert CHATS.cached(4) == CACHED, "a cache without end finds as much"


def test_without_a_prefix_cache_nothing_is_found() -> None:
    assert run(CHATS, prefix_caching=False).cached_tokens == 0


def test_blocks_are_whole_pages() -> None:
    with pytest.raises(BadRequest, match="blocks of 8 tokens are no multiple of the page size"):
        run(CHATS, page_size=3)


def test_a_request_longer_than_the_context_is_refused_before_anything_runs() -> None:
    with pytest.raises(BadRequest, match="chats has a request of 27 tokens, and the context is of"):
        run(CHATS, max_model_len=26)


def some(seed: int, **options: Any) -> Load:
    rng = random.Random(seed)
    requests = [
        LoadRequest(
            number / 50,
            rng.randrange(1, 300),
            rng.randrange(1, 60),
            tuple(rng.randrange(2) for _ in range(rng.randrange(4))),
            rng.choice("ab"),
            **options,
        )
        for number in range(40)
    ]
    return Load("some", requests, block_tokens=64)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_its_tokens_under_every_policy(policy: str) -> None:
    load = some(1)
    figures = run(load, policy, num_pages=150, max_model_len=400, host_pages=20)
    assert [len(record.tokens) for record in figures.records] == [
        request.num_output for request in load.requests
    ]
    assert {record.outcome for record in figures.records} == {"finished"}
    assert all(r.num_prefilled >= r.num_prompt - r.num_cached for r in figures.records)


def test_preempted_streams_stand_still_and_are_computed_again() -> None:
    """Short answers teach the scheduler to expect such, and then the pages run out."""
    short = [LoadRequest(0.0, 4, 1, group="short") for _ in range(150)]
    long = [LoadRequest(5.0, 20, 150, group="long") for _ in range(8)]
    figures = run(Load("full", [*short, *long]), num_pages=100, max_model_len=400)
    streams = figures.of_group("long")
    assert figures.num_preemptions == streams.num_preemptions > 0
    assert max(streams.itl) > 0.1
    computed = sum(record.num_prefilled for record in streams.records)
    assert computed > 20 * 8
    assert {record.outcome for record in figures.records} == {"finished"}


def test_the_same_run_has_the_same_figures() -> None:
    first, second = (run(some(2), num_pages=150, max_model_len=400) for _ in range(2))
    assert first.records == second.records
    assert (first.num_steps, first.makespan) == (second.num_steps, second.makespan)


def test_groups_are_parts_of_the_whole() -> None:
    figures = run(some(3))
    parts = [figures.of_group(name) for name in figures.groups]
    assert sorted(figures.groups) == ["a", "b"]
    assert sum(part.num_tokens for part in parts) == figures.num_tokens
    assert sorted([*parts[0].itl, *parts[1].itl]) == sorted(figures.itl)
    assert sorted([*parts[0].ttft, *parts[1].ttft]) == sorted(figures.ttft)


def test_the_scheduler_is_not_told_where_an_output_ends() -> None:
    workload = some(4).workload(limits(max_model_len=400))
    live = workload.enter(0)
    assert live.seq.output.max_length == 400
    assert not live.seq.output.surely_full


def test_late_requests_are_dropped_and_hopeless_ones_refused() -> None:
    requests = [LoadRequest(0.0, 200, 40, deadline=10.0) for _ in range(8)]
    requests += [LoadRequest(1.0, 200, 400, deadline=0.5)]  # 400 tokens take 2 s
    requests += [LoadRequest(3.0, 200, 4, deadline=0.0)]
    figures = run(Load("late", requests))
    records = figures.records
    assert [record.outcome for record in records] == ["finished"] * 8 + ["dropped", "refused"]
    assert [record.met for record in records] == [True] * 8 + [False] * 2
    assert 50 < len(records[8].tokens) < 400
    assert records[8].tokens[-1] <= 1.5
    assert not records[9].tokens


def test_progress_counts_to_the_end() -> None:
    seen: list[int] = []
    load = some(5)
    serve(load, limits(num_pages=1000, max_model_len=400), COST, POLICIES["fcfs"](), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(load.requests)


# -- hostile loads ---------------------------------------------------------------------------------


def test_hostile_loads_are_the_same_each_time_and_in_order() -> None:
    assert {name: make() for name, make in HOSTILE.items()} == {
        name: make() for name, make in HOSTILE.items()
    }
    for make in HOSTILE.values():
        arrivals = [request.arrival for request in make().load.requests]
        assert arrivals == sorted(arrivals)


def test_turns_of_a_conversation_are_almost_all_cached() -> None:
    load = cached_turns(20.0).load
    cached = {r.group: c for r, c in zip(load.requests, load.cached(16), strict=True)}
    assert cached == {"first": 0, "fresh": 0, "turn": 20_000}


def test_each_hostile_load_has_its_groups() -> None:
    groups = [
        {request.group for request in hostile.load.requests}
        for hostile in (wall(3), interfere(2), preempt(30.0), deadlines(10.0, 50))
    ]
    assert groups == [
        {"long", "short"},
        {"streams", "prompts"},
        {"long", "short"},
        {"1 s", "5 s", "30 s"},
    ]


def test_a_rate_stretches_the_same_requests() -> None:
    slow, fast = deadlines(1.0, 50).load, deadlines(10.0, 50).load
    assert [r.num_prompt for r in slow.requests] == [r.num_prompt for r in fast.requests]
    assert slow.requests[-1].arrival == pytest.approx(10 * fast.requests[-1].arrival)


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
