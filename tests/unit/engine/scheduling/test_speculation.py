"""When drafts are verified, what becomes of their tokens, and that nobody else waits for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

from asyncllm.engine.drafts.drafting import Drafting
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.speculation.learned import LEAST_ASKED
from asyncllm.types import FinishReason, SamplingParams
from asyncllm.wire.messages import StepPlan, unpack
from tests.support.engine.scheduling import EOS, FakeDevice, check_books, rows, scheduler, sequence


class Constant:
    """Always the same token."""

    kind, prior = "constant", 0.9

    def __init__(self, token: int):
        self._token = token

    def propose(self, tokens: array[int], most: int) -> list[int]:
        return [self._token] * most


class Told:
    """Knows the answer, but for every tenth token."""

    kind, prior = "told", 0.9

    def __init__(self, answer: list[int]):
        self._guess = [0 if i % 10 == 5 else token for i, token in enumerate(answer)]

    def propose(self, tokens: array[int], most: int) -> list[int]:
        done = len(tokens) - 5
        return self._guess[done : done + most]


class Silent:
    """Has no idea; counts how often it was asked."""

    kind, prior = "silent", 0.9
    asked = 0

    def propose(self, tokens: array[int], most: int) -> list[int]:
        Silent.asked += 1
        return []


class Runs:
    """A scheduler with two steps in flight on a device that samples fives, or what it is given."""

    def __init__(self, **limits: Any):
        shape = {"max_draft_tokens": 3, "max_num_batched_tokens": 64, "max_model_len": 200}
        self.sched: Scheduler = scheduler(**{**shape, "page_size": 4, **limits})
        self.device = FakeDevice(self.sched.limits)
        self.plans: list[StepPlan] = []
        self.tokens: dict[int, list[int]] = {}
        self.samples: Iterator[int] = repeat(5)
        self.seconds = 0.001
        #: By this factor, steps that verify take longer.
        self.slower = 1.1
        self.now = 0.0

    def add(self, id: int, guess: int | None, max_tokens: int = 40, **params: Any) -> Sequence:
        wanted = SamplingParams(max_tokens=max_tokens, **params)
        seq = sequence(id, 5, max_tokens, wanted)
        if guess is not None:
            seq.drafting = Drafting([Constant(guess)])
        self.tokens[id] = []
        self.sched.add(seq, self.now)
        return seq

    def fill(self) -> None:
        """Plan until two steps are in flight."""
        while len(self.device.steps) < 2:
            planned = self.sched.plan(len(self.plans), self.now)
            if planned is None:
                return
            self.plans.append(planned.message)
            self.device.take(planned.message, self.samples)

    def land(self) -> None:
        seconds = self.seconds * (self.slower if self.sched.in_flight[0].drafts else 1.0)
        self.now += seconds
        applied = self.sched.apply(self.device.answer(seconds=seconds), self.now)
        for seq, _, token, _ in applied.emitted:
            self.tokens[seq.id].append(token)

    def run(self) -> int:
        """Until nothing is left; returns the number of steps."""
        before = len(self.plans)
        self.fill()
        while self.device.steps:
            self.land()
            self.fill()
        assert self.sched.idle
        check_books(self.sched, [])
        assert self.sched.leak_check.mismatch() is None
        return len(self.plans) - before

    @property
    def drafts(self) -> list[int]:
        return [len(unpack(plan.drafts)) for plan in self.plans]


def test_what_was_right_and_one_token_more_come_in_one_step() -> None:
    runs = Runs()
    runs.add(0, guess=None, max_tokens=9)  # how long a step takes is known then
    runs.run()
    seq = runs.add(1, guess=5, max_tokens=21)
    # The prompt, the token that was planned with it, and 4 tokens in each step.
    assert runs.run() <= 8
    assert runs.tokens[1] == [5] * 21
    assert max(runs.drafts) == 3
    tally = runs.sched.drafted["constant"]
    assert tally.num_right == tally.num_drafted > 10
    assert len(seq.tokens) == seq.output.max_length


@pytest.mark.parametrize("gap", [0.0, 1.0], ids=["waits", "overlaps"])
def test_a_wrong_token_does_not_mislead_the_drafts_after_it(gap: float) -> None:
    """The next row, planned already, drafts for another place; those after it do not."""
    runs, answer = Runs(), list(range(300, 420))
    runs.samples = iter(answer)
    runs.sched._speculation._costs.gap = gap  # type: ignore[attr-defined]
    seq = runs.add(1, None, max_tokens=len(answer))
    seq.drafting = Drafting([Told(answer)])
    # 3 + 3 + 3 + 1 tokens in four steps, or one and another one that is misled.
    assert runs.run() < len(answer) * (0.45 if gap == 0.0 else 0.65)
    assert runs.tokens[1] == answer


def test_wrong_drafts_end_and_cost_little() -> None:
    runs = Runs()
    runs.add(1, guess=6, max_tokens=150)
    runs.run()
    assert runs.tokens[1] == [5] * 150
    assert 0 < sum(map(bool, runs.drafts)) < 8


@pytest.mark.parametrize("guess", [5, 6])
def test_others_have_a_row_in_every_step(guess: int) -> None:
    runs = Runs()
    other = runs.add(1, None, max_tokens=40)
    runs.add(2, guess, max_tokens=40)
    runs.fill()
    while len(other.tokens) < 43:
        slots = {slot for slot, _, _ in rows(runs.plans[-1])}
        assert other.slot in slots
        runs.land()
        runs.fill()
    if guess == 5:
        assert any(runs.drafts)
    runs.run()
    assert runs.tokens == {1: [5] * 40, 2: [5] * 40}


def test_nothing_is_drafted_while_prompts_wait() -> None:
    runs = Runs(max_num_batched_tokens=16, prefill_chunk=4)
    runs.add(1, guess=5, max_tokens=60)
    runs.fill()
    runs.land()
    runs.fill()
    for id in range(2, 6):
        runs.add(id, None, max_tokens=4)
    begun = len(runs.plans)
    runs.fill()
    while runs.sched.backlog.num_waiting or runs.sched.batch.prefilling:
        runs.land()
        runs.fill()
    prompts = [plan for plan in runs.plans[begun:] if any(q > 1 for _, _, q in rows(plan))]
    assert not any(plan.drafts and len(prompts) for plan in prompts[:-1])
    runs.run()
    assert any(runs.drafts)


def test_an_end_within_a_draft_drops_the_rest() -> None:
    runs = Runs()
    seq = runs.add(1, guess=EOS, max_tokens=30)
    runs.sched._speculation._best = (  # type: ignore[attr-defined]
        lambda wanting, *_, **__: ([len(each.found.tokens) for each in wanting], False)
    )
    runs.fill()
    runs.land()
    while not any(runs.drafts):
        runs.fill()
        if not any(runs.drafts):
            runs.land()
    while len(runs.device.steps) > 1:
        runs.land()
    # The device samples the end three times.
    step = runs.device.steps[-1]
    assert runs.drafts[-1] == 3
    step.tokens = [EOS, EOS, EOS, 5]
    applied = runs.sched.apply(runs.device.answer(), 0.0)
    assert [(token, finish) for _, _, token, finish in applied.emitted] == [
        (EOS, FinishReason.STOP)
    ]
    assert seq.state is SeqState.FINISHED
    assert runs.sched.idle
    assert runs.sched.leak_check.mismatch() is None


def test_no_sequence_is_preempted_for_a_draft() -> None:
    runs = Runs(num_pages=9, max_model_len=32)
    runs.add(1, guess=5, max_tokens=11)
    runs.add(2, guess=5, max_tokens=11)
    runs.run()
    assert runs.sched.departures.num_preemptions == 0
    assert runs.tokens == {1: [5] * 11, 2: [5] * 11}


def test_few_are_asked_while_nobody_has_an_idea() -> None:
    runs = Runs(max_num_seqs=256, num_pages=9000, max_num_batched_tokens=4000)
    runs.add(0, guess=5, max_tokens=190)
    runs.run()
    assert any(runs.drafts)
    for id in range(1, 101):
        runs.add(id, None, max_tokens=40).drafting = Drafting([Silent()])
    before = Silent.asked
    steps = runs.run()
    assert LEAST_ASKED <= (Silent.asked - before) / steps < LEAST_ASKED + 5
    assert {len(tokens) for tokens in runs.tokens.values()} == {40, 190}


def test_drafts_beside_as_many_rows_as_fit_are_left_out() -> None:
    runs = Runs(max_num_seqs=3)
    for id in range(1, 4):
        runs.add(id, guess=5, max_tokens=20)
    runs.run()
    for plan in runs.plans:
        drafted = len(unpack(plan.drafts))
        assert not drafted or drafted + len(rows(plan)) <= 3


def test_slow_verifying_ends_drafts() -> None:
    """Right as they are: a step with drafts that takes five times as long does not pay."""
    runs = Runs()
    runs.slower = 5.0
    runs.add(1, guess=5, max_tokens=190)
    runs.run()
    assert runs.tokens[1] == [5] * 190
    assert 0 < sum(map(bool, runs.drafts)) < 20


@pytest.mark.parametrize("slower", [1.05, 1.3, 3.0])
@pytest.mark.parametrize("clients", [1, 3, 20])
def test_wrong_drafts_lose_little_time(clients: int, slower: float) -> None:
    """However slow verifying is, and however much is expected of drafts."""
    runs = Runs(max_num_seqs=32, num_pages=2000)
    runs.slower = slower
    for id in range(clients):
        runs.add(id, guess=6, max_tokens=190)
    runs.run()
    # Beside what two steps lose before anything is known.
    assert runs.now <= 0.001 * len(runs.plans) * 1.005 + 0.003 * slower
    assert all(tokens == [5] * 190 for tokens in runs.tokens.values())


def test_a_kind_that_is_wrong_for_others_is_not_tried_again_at_once() -> None:
    runs = Runs()
    for id in range(1, 12):
        runs.add(id, guess=6, max_tokens=20)
        runs.run()
    assert sum(map(bool, runs.drafts)) < 0.1 * len(runs.plans)
    # It is, after many steps; and if it is right then, it is used.
    for id in range(12, 40):
        runs.add(id, guess=5, max_tokens=190)
        runs.run()
    assert len(unpack(runs.plans[-1].drafts)) > 0 or any(runs.drafts[-20:])
