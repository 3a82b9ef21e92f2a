"""Why a waiting request waits, as the scheduler tells it."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest

from asyncllm.engine.requests.view import computes
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.waiting.reason import Wait
from tests.support.engine.scheduling import FakeDevice, rows, scheduler, sequence


class World:
    """A scheduler and its device, with a sequence of each prompt, after one plan."""

    def __init__(self, *prompts: int | list[int], max_tokens: int = 4, **limits: Any):
        self.scheduler = scheduler(**limits)
        self.device = FakeDevice(self.scheduler.limits)
        self.number = 0
        self.seqs = [sequence(i, prompt, max_tokens) for i, prompt in enumerate(prompts, 1)]
        for seq in self.seqs:
            self.scheduler.add(seq, 0.0)
        assert self.plan()

    def plan(self) -> list[tuple[int, int, int]]:
        """The rows of the next step, if there is one."""
        planned = self.scheduler.plan(self.number, 0.0)
        if planned is None:
            return []
        self.number += 1
        self.device.take(planned.message, repeat(1))
        return rows(planned.message)

    def finish_step(self) -> None:
        if self.device.steps:
            self.scheduler.apply(self.device.answer(), 0.0)

    def why(self, seq: Sequence) -> Wait:
        assert seq.state in (SeqState.WAITING, SeqState.LOADING)
        return self.scheduler.backlog.why(seq)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_num_seqs": 1}, "slots"),
        ({"num_pages": 20, "max_tokens": 40}, "pages"),  # of which the first may need 15
        ({"max_num_batched_tokens": 8, "itl_target": 0.0}, "budget"),
    ],
)
def test_the_queue(limits: dict[str, Any], reason: str) -> None:
    world = World(12, 13, 14, **limits)
    first, second, third = world.seqs
    assert first.state is SeqState.RUNNING
    assert (world.why(second).reason, world.why(third).reason) == (reason, reason)
    assert (world.why(second).ahead, world.why(third).ahead) == (0, 1)
    assert world.why(second).needs == -(-second.output.max_length // 4)
    if reason == "pages":
        assert world.why(second).available < world.why(second).needs


def test_deadlines_go_before_in_their_places() -> None:
    world = World(12, max_num_seqs=1)
    seqs = [sequence(i, 12, arrival=0.1 * i, deadline_ms=1e6 - 1000 * i) for i in range(2, 5)]
    for seq in seqs:
        world.scheduler.add(seq, 1.0)
    assert [world.why(seq).ahead for seq in seqs] == [2, 1, 0]


def test_a_newcomer_waits_for_the_next_plan() -> None:
    world = World(4)
    newcomer = sequence(9, 5)
    world.scheduler.add(newcomer, 0.1)
    assert world.why(newcomer).reason == "step"


def test_a_shared_prefix_and_who_computes_it() -> None:
    tokens = list(range(10, 30))
    world = World(tokens, [*tokens, 1, 2])
    first, second = world.seqs
    told = world.why(second)
    assert (told.reason, told.prefix_pages) == ("prefix", 5)
    assert computes([second, first], told) is first
    assert computes([], told) is None
    world.finish_step()
    assert world.why(second).reason == "step", "the prefix is there now"


def test_one_that_was_preempted_while_its_step_is_under_way() -> None:
    world = World(4, 5)
    world.plan()
    world.scheduler.apply(world.device.answer(error="planted"), 0.0)
    world.plan()
    assert {world.why(seq).reason for seq in world.seqs} == {"preempted"}


def test_a_failed_steps_requests_run_first() -> None:
    world = World(4, 5)
    others = [sequence(i, 4) for i in (8, 9)]
    world.scheduler.apply(world.device.answer(error="planted"), 0.0)
    for seq in others:
        world.scheduler.add(seq, 0.0)
    world.plan()
    assert {world.why(seq).reason for seq in others} == {"trial"}


def test_asking_changes_nothing() -> None:
    def plans(*, ask: bool) -> list[list[tuple[int, int, int]]]:
        tokens = list(range(10, 30))
        world = World(20, 21, tokens, [*tokens, 1], 22, num_pages=24, max_num_seqs=3, max_tokens=8)
        found = []
        for _ in range(40):
            for seq in world.seqs if ask else ():
                if seq.state is SeqState.RUNNING:
                    world.scheduler.batch.progress(seq)
                elif seq.state is not SeqState.FINISHED:
                    world.scheduler.backlog.why(seq)
            found.append(world.plan())
            world.finish_step()
        assert all(seq.state is SeqState.FINISHED for seq in world.seqs)
        return found

    assert plans(ask=True) == plans(ask=False)


def test_progress() -> None:
    world = World(20, max_num_batched_tokens=16, itl_target=0.0)
    [seq] = world.seqs
    told = world.scheduler.batch.progress(seq)
    assert (told.computed, told.prompt_left) == (16, 4)
    assert (told.own_pages, told.prefix_page) == (len(seq.kv.pages), -1)


def test_pages_that_were_found_are_not_its_own() -> None:
    tokens = list(range(10, 30))
    world = World(tokens, [*tokens, 1, 2])
    while world.seqs[1].state is not SeqState.RUNNING:
        world.finish_step()
        world.plan()
    told = world.scheduler.batch.progress(world.seqs[1])
    assert told.own_pages == len(world.seqs[1].kv.pages) - 5
    assert told.prefix_page == world.seqs[1].kv.pages[0] == world.seqs[0].kv.pages[0]
