"""Prompts spread over steps, so that steps are alike and a batch ends no later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.policy import LongestFirst
from asyncllm.engine.recording.trace_file import CHUNK
from asyncllm.engine.scheduling.pace import CHUNK_SECONDS, GAP
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.timing.prefill_room import StepCost
from asyncllm.engine.scheduling.waiting.queue import WaitingQueue
from asyncllm.types import SamplingParams
from asyncllm.wire.messages import StepResult, pack, unpack
from tests.support.engine.scheduling import limits, sequence

Work = list[tuple[int, int]]


class AllAtOnce(LongestFirst):
    evenly = False


def scheduler_of(work: Work, policy: LongestFirst, **changes: Any) -> Scheduler:
    """With requests of such lengths; ``certain``: which of them nothing but their length ends."""
    certain = changes.pop("certain", [True] * len(work))
    roomy = {
        "num_pages": 20_000,
        "page_size": 16,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "prefill_chunk": 8192,
        "itl_target": 0.0,
        "max_waiting": 1000,
    }
    scheduler = Scheduler.create(limits(**{**roomy, **changes}), policy)
    for id, (prompt, output) in enumerate(work):
        params = SamplingParams(max_tokens=output, ignore_eos=certain[id])
        scheduler.add(sequence(id, prompt, output, params), 0.0)
    return scheduler


def steps_of(
    work: Work, policy: LongestFirst, in_flight: int = 1, **changes: Any
) -> list[tuple[int, int]]:
    """Decode rows and prompt tokens of each step, for prompts and outputs of such lengths."""
    scheduler = scheduler_of(work, policy, **changes)
    steps: list[tuple[int, int]] = []
    rows: deque[int] = deque()
    while True:
        planned = scheduler.plan(len(steps), 0.0)
        if planned is not None:
            q_lens = unpack(planned.message.rows, 3)[:, 2]
            num_prompt = sum(q_len for _, q_len in _chunks(scheduler))
            steps.append((planned.num_tokens - num_prompt, num_prompt))
            rows.append(len(q_lens))
        elif not rows:
            break
        if planned is None or len(rows) == in_flight:
            number = len(steps) - len(rows)
            apply(scheduler, number, rows.popleft())
    assert not scheduler.batch.running
    assert scheduler.backlog.num_waiting == 0
    computed, asked = sum(tokens for _, tokens in steps), sum(prompt for prompt, _ in work)
    assert computed > asked if scheduler.departures.num_preemptions else computed == asked
    return steps


def apply(scheduler: Scheduler, number: int, num_rows: int) -> None:
    tokens = pack([50] * num_rows)
    scheduler.apply(StepResult(number, tokens, (), None, 0.0, 0.0), 0.0)


def _chunks(scheduler: Scheduler) -> list[tuple[int, int]]:
    step = scheduler.in_flight[-1]
    return list(zip(step.chunk_rows[1::3], step.chunk_rows[2::3], strict=True))


def both(
    work: Work, in_flight: int = 1, **changes: Any
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """``steps_of`` with the pace, and without."""
    evenly = steps_of(work, LongestFirst(), in_flight, **changes)
    return evenly, steps_of(work, AllAtOnce(), in_flight, **changes)


WORK: Work = [(100 + 37 * i % 900, 20 + 53 * i % 700) for i in range(128)]


def test_steps_are_more_alike_and_no_more() -> None:
    evenly, at_once = both(WORK)
    assert len(evenly) <= len(at_once) + 2
    assert max(map(sum, at_once)) == 8192
    assert max(map(sum, evenly)) < 2 * CHUNK
    # Up to so many tokens a step takes what reading the weights takes.
    paid = [sum(max(sum(step), 192) for step in steps) for steps in (evenly, at_once)]
    assert paid[0] < 0.95 * paid[1]
    most, most_at_once = (max(rows for rows, _ in steps) for steps in (evenly, at_once))
    assert most_at_once == len(WORK)
    # All outputs one after the other in so many rows would take as many steps as the longest one.
    rows = sum(output for _, output in WORK) / max(output for _, output in WORK)
    assert most < 1.2 * rows


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300)), min_size=1, max_size=40),
    st.sampled_from([1, 2]),
    st.sampled_from([{}, {"max_num_batched_tokens": 300}, {"num_pages": 400}, {"max_num_seqs": 8}]),
)
def test_no_prompt_comes_so_late_that_the_batch_ends_later(
    work: Work, in_flight: int, scarce: dict[str, int]
) -> None:
    evenly, at_once = both(work, in_flight, **scarce)
    assert len(evenly) <= len(at_once) + 3
    assert all(rows or prompts for rows, prompts in evenly)


def begin_alike(work: Work, **changes: Any) -> bool:
    """Whether prompts begin when they would without a pace."""
    evenly, at_once = both(work, **changes)
    return evenly == at_once


def test_prompts_begin_at_once_unless_they_can_wait() -> None:
    assert not begin_alike(WORK)
    assert begin_alike([(prompt, 100) for prompt, _ in WORK])
    assert begin_alike(WORK, certain=[False] * len(WORK))
    assert begin_alike(WORK, itl_target=0.05)


@pytest.mark.parametrize("num_pages", [2000, 4000, 6000, 7187])
def test_prompts_that_wait_for_pages_begin_at_once(num_pages: int) -> None:
    assert sum(-(-(prompt + output) // 16) for prompt, output in WORK) == 7188
    evenly, at_once = both(WORK, num_pages=num_pages)
    assert evenly[:10] == at_once[:10]
    assert len(evenly) <= len(at_once) + 3


def test_small_steps_end_no_later() -> None:
    evenly, at_once = both(WORK, in_flight=2, max_num_batched_tokens=256)
    assert len(evenly) <= len(at_once) + 3


@pytest.mark.parametrize("number", [0, 1, 100])
def test_nobody_waits_for_an_output_that_may_end_sooner(number: int) -> None:
    longest_first = sorted(WORK, key=lambda lengths: -lengths[1])
    certain = [i != number for i in range(len(WORK))]
    assert begin_alike(longest_first, certain=certain)


def test_prompts_that_wait_for_a_slot_begin_at_once() -> None:
    evenly, at_once = both(WORK, max_num_seqs=16)
    waiting = next(i for i, (rows, _) in enumerate(at_once) if rows > 0)
    assert evenly[:waiting] == at_once[:waiting]
    assert len(evenly) <= len(at_once) + 3


def test_a_queue_longer_than_there_are_slots_is_not_walked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walk = WaitingQueue.__iter__

    def checked(queue: WaitingQueue) -> Iterator[Sequence]:
        assert len(queue) <= 16
        return walk(queue)

    monkeypatch.setattr(WaitingQueue, "__iter__", checked)
    assert max(rows for rows, _ in steps_of(WORK, LongestFirst(), max_num_seqs=16)) == 16


@pytest.mark.parametrize("late", [1, GAP // 2, 3 * GAP, 100])
def test_who_comes_late_waits_for_nobody(late: int) -> None:
    """Unless it is still of the batch: then it waits as others of its length do."""
    output = 10
    scheduler = scheduler_of([(20, 1000), *[(20, 600)] * 20], LongestFirst())
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    seq = sequence(100, 30, output, params)
    ended = 0
    for number in range(700):
        if number == late:
            scheduler.add(seq, 0.0)
        planned = scheduler.plan(number, 0.0)
        assert planned is not None
        apply(scheduler, number, len(unpack(planned.message.rows, 3)))
        if not ended and len(seq.tokens) == 30 + output:
            ended = number
    assert (ended == late + output - 1) == (late > GAP)
    assert ended > 0


def test_chunks_are_worth_their_time() -> None:
    scheduler = scheduler_of(WORK[:60], LongestFirst())
    scheduler.times.cost = StepCost(1e-3, CHUNK_SECONDS / 2000, 0.0, 0.0, 0)
    planned = scheduler.plan(0, 0.0)
    assert planned is not None
    assert 2000 <= planned.num_tokens < 3000


@pytest.mark.parametrize("output", [0, 1])
def test_prompts_that_generate_next_to_nothing(output: int) -> None:
    work = [(prompt, output) for prompt, _ in WORK]
    assert sum(map(sum, steps_of(work, LongestFirst()))) == sum(prompt for prompt, _ in work)
