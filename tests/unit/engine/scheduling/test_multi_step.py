"""Several tokens a row in one step: when, how many, and what happens to those after an end."""

from __future__ import annotations

from itertools import repeat
from typing import Any

from asyncllm.engine.scheduling.decode import MULTI_STEP_SECONDS
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import SeqState
from asyncllm.types import FinishReason
from asyncllm.wire.messages import BAD_TOKEN, StepPlan
from tests.support.engine.scheduling import EOS, FakeDevice, check_books, rows, scheduler, sequence


class Runs:
    """A scheduler and its device, one step after the other."""

    def __init__(self, sched: Scheduler):
        self.sched = sched
        self.device = FakeDevice(sched.limits)
        self.number = 0

    def plan(self, tokens: list[int] | None = None) -> StepPlan:
        planned = self.sched.plan(self.number, 0.0)
        assert planned is not None
        self.number += 1
        self.device.take(planned.message, iter(tokens) if tokens else repeat(5))
        return planned.message

    def land(self, seconds: float = 0.001) -> list[tuple[int, int, FinishReason | None]]:
        applied = self.sched.apply(self.device.answer(seconds=seconds), 0.0)
        return [(seq.id, token, finish) for seq, _, token, finish in applied.emitted]


def decoding(max_tokens: int = 20, count: int = 1, **limits: Any) -> Runs:
    """Sequences 1.. with prompts of 5 tokens that are computed, and one token each."""
    runs = Runs(scheduler(max_decode_steps=4, **{"max_num_batched_tokens": 256, **limits}))
    for id in range(1, count + 1):
        runs.sched.add(sequence(id, 5, max_tokens), 0.0)
    assert runs.plan().decode_steps == 1
    runs.land()
    return runs


def test_rows_alone_yield_several_tokens_each() -> None:
    runs = decoding(count=2)
    plan = runs.plan([11, 21, 12, 22, 13, 23, 14, 24])
    assert plan.decode_steps == 4
    assert [(start, q_len) for _, start, q_len in rows(plan)] == [(5, 1), (5, 1)]
    emitted = [(id, token) for id, token, _ in runs.land()]
    assert emitted == [(1, 11), (2, 21), (1, 12), (2, 22), (1, 13), (2, 23), (1, 14), (2, 24)]
    assert [start for _, start, _ in rows(runs.plan())] == [9, 9]


def test_what_waits_or_is_long_is_not_made_to_wait_for_several_steps() -> None:
    runs = decoding()
    runs.sched.add(sequence(9, 300 % 40, 4), 0.0)
    plan = runs.plan()
    assert plan.decode_steps == 1
    assert len(rows(plan)) == 2


def test_no_row_passes_its_end() -> None:
    runs = decoding(max_tokens=8)  # one is there, 7 are to come
    taken = []
    while runs.sched.batch.running:
        taken.append(runs.plan().decode_steps)
        runs.land()
    assert taken == [4, 1, 1, 1]
    check_books(runs.sched, [])


def test_many_rows_take_one_step_at_a_time() -> None:
    assert decoding(count=3, multi_step_rows=3).plan().decode_steps == 4
    assert decoding(count=4, multi_step_rows=3).plan().decode_steps == 1


def test_tokens_do_not_wait_long_for_the_rest_of_their_steps() -> None:
    for seconds, decode_steps in ((0.9, 4), (1.1, 1)):
        runs = decoding(max_tokens=60)
        for _ in range(3):
            runs.land(runs.plan().decode_steps * seconds * MULTI_STEP_SECONDS / 4)
        assert runs.plan().decode_steps == decode_steps


def test_nobody_is_preempted_for_more_steps() -> None:
    runs = decoding(count=2, num_pages=6, page_size=2, max_model_len=12, max_tokens=7)
    while runs.sched.batch.running:
        assert runs.plan().decode_steps == 1, "6 pages are too few"
        runs.land()


def test_tokens_after_the_end_are_dropped() -> None:
    runs = decoding(count=2)
    runs.plan([11, 21, EOS, 22, 13, 23, 14, 24])
    emitted = runs.land()
    assert emitted[2] == (1, EOS, FinishReason.STOP)
    assert [id for id, _, _ in emitted] == [1, 2, 1, 2, 2, 2]
    assert list(runs.sched.batch.running) == [2]


def test_a_bad_token_ends_its_row_and_taints_what_it_wrote() -> None:
    runs = decoding(count=2)
    first = runs.sched.batch.running[1]
    runs.plan([11, 21, BAD_TOKEN, 22, BAD_TOKEN, 23, 14, 24])
    emitted = runs.land()
    assert [token for id, token, _ in emitted if id == 1] == [11, BAD_TOKEN]
    assert first.state is SeqState.FINISHED
    assert first.kv.corrupt


def test_several_steps_under_way_when_the_next_is_planned() -> None:
    runs = decoding(max_tokens=30)
    first, second = runs.plan(), runs.plan()
    assert (first.decode_steps, second.decode_steps) == (4, 4)
    assert [start for _, start, _ in rows(first) + rows(second)] == [5, 9]
    runs.sched.finish(runs.sched.batch.running[1], 0.0)
    assert runs.land() == runs.land() == []
    check_books(runs.sched, [])
