"""Prompts spread over steps, so that steps are alike and a batch ends no later."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.pace import CHUNK, CHUNK_SECONDS, MAX_PAUSE
from asyncllm.engine.policy import LongestFirst
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.step_time import StepCost
from asyncllm.types import SamplingParams
from asyncllm.wire.messages import StepResult, pack, unpack
from tests.unit.scheduling import limits, sequence

Work = list[tuple[int, int]]


class AllAtOnce(LongestFirst):
    evenly = False


def steps_of(work: Work, policy: LongestFirst, **changes: Any) -> list[tuple[int, int]]:
    """Decode rows and prompt tokens of each step, for prompts and outputs of such lengths."""
    certain = changes.pop("certain", True)
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
        params = SamplingParams(max_tokens=output, ignore_eos=certain)
        scheduler.add(sequence(id, prompt, output, params), 0.0)
    steps: list[tuple[int, int]] = []
    while (planned := scheduler.plan(len(steps), 0.0)) is not None:
        q_lens = unpack(planned.message.rows, 3)[:, 2]
        num_prompt = sum(q_len for _, q_len in _chunks(scheduler))
        steps.append((planned.num_tokens - num_prompt, num_prompt))
        tokens = pack([50] * len(q_lens))
        scheduler.apply(StepResult(len(steps) - 1, tokens, (), None, 0.0, 0.0), 0.0)
    assert not scheduler.running
    assert scheduler.num_waiting == 0
    assert sum(tokens for _, tokens in steps) == sum(prompt for prompt, _ in work)
    return steps


def _chunks(scheduler: Scheduler) -> list[tuple[int, int]]:
    [step] = scheduler._in_flight
    return list(zip(step.chunk_rows[1::3], step.chunk_rows[2::3], strict=True))


WORK: Work = [(100 + 37 * i % 900, 20 + 53 * i % 700) for i in range(128)]


def test_steps_are_more_alike_and_no_more() -> None:
    evenly, at_once = (steps_of(WORK, policy) for policy in (LongestFirst(), AllAtOnce()))
    assert len(evenly) <= len(at_once) + 2
    assert max(map(sum, at_once)) == 8192
    assert max(map(sum, evenly)) < 2 * CHUNK
    most, most_at_once = (max(rows for rows, _ in steps) for steps in (evenly, at_once))
    assert most_at_once == len(WORK)
    # All outputs one after the other in so many rows would take as many steps as the longest one.
    rows = sum(output for _, output in WORK) / max(output for _, output in WORK)
    assert most < 1.2 * rows


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300)), min_size=1, max_size=40))
def test_no_prompt_comes_so_late_that_the_batch_ends_later(work: Work) -> None:
    evenly, at_once = (steps_of(work, policy) for policy in (LongestFirst(), AllAtOnce()))
    assert len(evenly) <= len(at_once) + 3
    assert all(rows or prompts for rows, prompts in evenly)


def test_outputs_of_one_length_begin_at_once() -> None:
    work = [(prompt, 100) for prompt, _ in WORK]
    assert steps_of(work, LongestFirst()) == steps_of(work, AllAtOnce())


def test_outputs_that_may_end_sooner_begin_at_once() -> None:
    evenly, at_once = (
        steps_of(WORK, policy, certain=False) for policy in (LongestFirst(), AllAtOnce())
    )
    assert evenly == at_once


def test_prompts_that_wait_for_a_slot_begin_at_once() -> None:
    evenly, at_once = (
        steps_of(WORK, policy, max_num_seqs=16) for policy in (LongestFirst(), AllAtOnce())
    )
    waiting = next(i for i, (rows, _) in enumerate(at_once) if rows > 0)
    assert evenly[:waiting] == at_once[:waiting]
    assert len(evenly) <= len(at_once) + 3


def test_who_comes_later_waits_for_some_steps_at_most() -> None:
    scheduler = Scheduler.create(
        limits(num_pages=20_000, page_size=16, max_model_len=4096, max_num_seqs=64), LongestFirst()
    )
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    scheduler.add(sequence(0, 20, 1000, params), 0.0)
    late = sequence(1, 30, 10, SamplingParams(max_tokens=10, ignore_eos=True))
    for number in range(50 + MAX_PAUSE):
        if number == 50:
            scheduler.add(late, 0.0)
        planned = scheduler.plan(number, 0.0)
        assert planned is not None
        tokens = pack([50] * len(unpack(planned.message.rows, 3)))
        scheduler.apply(StepResult(number, tokens, (), None, 0.0, 0.0), 0.0)
    assert len(late.tokens) > late.num_prompt


def test_chunks_are_worth_their_time() -> None:
    scheduler = Scheduler.create(
        limits(
            num_pages=20_000,
            page_size=16,
            max_model_len=4096,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            prefill_chunk=8192,
            itl_target=0.0,
        ),
        LongestFirst(),
    )
    scheduler.times.cost = StepCost(1e-3, CHUNK_SECONDS / 2000, 0.0, 0.0, 0)
    for id, (prompt, output) in enumerate(WORK[:60]):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        scheduler.add(sequence(id, prompt, output, params), 0.0)
    planned = scheduler.plan(0, 0.0)
    assert planned is not None
    assert 2000 <= planned.num_tokens < 3000


@pytest.mark.parametrize("output", [0, 1])
def test_prompts_that_generate_next_to_nothing(output: int) -> None:
    work = [(prompt, output) for prompt, _ in WORK]
    assert sum(map(sum, steps_of(work, LongestFirst()))) == sum(prompt for prompt, _ in work)
