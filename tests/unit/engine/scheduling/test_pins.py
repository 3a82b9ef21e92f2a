"""What requests get for ``cache_ttl_s``, and what it never costs others."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest

from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.types import SamplingParams
from asyncllm.wire.messages import StepResult, pack
from tests.support.engine.scheduling import (
    FakeDevice,
    expect_outputs,
    rows,
    scheduler,
    sequence,
    tree_nodes,
)

#: 32 tokens: eight pages.
AGENT = list(range(200, 232))


class Serving:
    """A scheduler and a device that serve requests, a step each hundredth of a second.

    There are 64 pages of 4 tokens. A tenant may pin 16 of them.
    """

    def __init__(self, **changes: Any):
        self.sched = scheduler(**changes)
        self.device = FakeDevice(self.sched.limits)
        self.now = 0.0
        self.num_steps = 0
        self.num_requests = 0
        #: Rows of each step.
        self.rows: list[list[tuple[int, int, int]]] = []

    def add(
        self,
        prompt: int | list[int],
        max_tokens: int = 4,
        *,
        known_length: bool = True,
        **scheduling: Any,
    ) -> Sequence:
        self.num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=known_length)
        seq = sequence(
            self.num_requests, prompt, max_tokens, params, arrival=self.now, **scheduling
        )
        self.sched.add(seq, self.now)
        return seq

    def run(self) -> None:
        """Until nothing is left to do."""
        while (planned := self.sched.plan(self.num_steps, self.now)) or self.device.steps:
            if planned is not None:
                self.num_steps += 1
                self.rows.append(rows(planned.message))
                self.device.take(planned.message, repeat(3))
            if planned is None or len(self.device.steps) == 2:
                self.sched.apply(self.device.answer(), self.now)
            self.now += 0.01

    def serve(self, prompt: int | list[int], max_tokens: int = 4, **scheduling: Any) -> Sequence:
        seq = self.add(prompt, max_tokens, **scheduling)
        self.run()
        return seq

    def flood(self, count: int = 40, **scheduling: Any) -> None:
        """Requests of nine pages each, one after the other, none like another."""
        for _ in range(count):
            self.serve(33, **scheduling)


@pytest.mark.parametrize(("ttl", "found"), [(None, 0), (60.0, 32)])
def test_an_agent_finds_its_prefix_after_a_flood_of_others(ttl: float | None, found: int) -> None:
    serving = Serving()
    first = serving.serve(AGENT, cache_ttl_s=ttl)
    serving.flood()
    turn = serving.serve([*first.tokens, 8, 9], cache_ttl_s=ttl)
    assert turn.num_cached == found
    kinds = [(event.kind, event.a, event.b) for event in first.timeline.events]
    assert (("pinned", 8, 60_000) in kinds) == (ttl is not None)
    serving.flood()
    assert serving.serve([*turn.tokens, 8, 9]).num_cached == (40 if found else 0), "and so on"


def test_what_was_generated_is_pinned_as_well() -> None:
    serving = Serving()
    first = serving.serve(AGENT, 17, cache_ttl_s=60.0)
    serving.flood()
    assert serving.serve([*first.tokens, 8]).num_cached == 48


def test_after_its_time_a_prefix_is_evicted_as_all_others() -> None:
    serving = Serving()
    first = serving.serve(AGENT, cache_ttl_s=5.0)
    ended = serving.now
    serving.flood()
    assert serving.sched.cache.pins.num_pages == 8
    serving.now = ended + 5.1
    serving.flood()
    assert serving.sched.cache.pins.num_pages == 0
    assert serving.serve([*first.tokens, 8]).num_cached == 0


def test_a_request_that_was_cut_short_is_pinned_up_to_there() -> None:
    serving = Serving()
    seq = serving.add(AGENT, 20, cache_ttl_s=60.0)
    for number in range(6):
        planned = serving.sched.plan(number, 0.0)
        assert planned is not None
        serving.device.take(planned.message, repeat(3))
        serving.sched.apply(serving.device.answer(), 0.0)
    serving.sched.finish(seq, 0.0)
    serving.num_steps = 6
    serving.flood()
    assert serving.serve([*seq.tokens, 8]).num_cached == 36


def test_a_tenant_that_pins_everything_leaves_others_their_place() -> None:
    serving = Serving()
    serving.serve(AGENT, tenant="agent", cache_ttl_s=60.0)
    for _ in range(40):
        serving.flood(2, tenant="greedy", cache_ttl_s=60.0)
        assert serving.sched.cache.pins.held_by("greedy") <= 16
        assert serving.serve([*AGENT, 8], tenant="agent").num_cached == 32
    # Six of seven such requests would fit without pins; those of the other tenant take a quarter.
    prompts = [serving.serve(33).tokens for _ in range(4)]
    assert all(serving.serve([*tokens, 8]).num_cached == 36 for tokens in prompts)


def test_pins_change_no_admission() -> None:
    """Prompts that share nothing run alike, whether all pages are pinned or none."""

    def load(share: float) -> Serving:
        serving = Serving(max_pinned_share=share)
        for _ in range(20):
            serving.serve(9, cache_ttl_s=3600.0)
        del serving.rows[:]
        for i in range(60):
            serving.add(10 + 7 * i % 30, 2 + 11 * i % 28, cache_ttl_s=3600.0)
        serving.run()
        return serving

    with_pins, without = load(1.0), load(0.0)
    assert with_pins.rows == without.rows
    assert with_pins.sched.departures.num_preemptions == 0
    assert with_pins.sched.cache.pins.num_evicted > 100


def test_who_outgrows_what_was_expected_takes_pages_from_pins() -> None:
    serving = Serving(max_pinned_share=1.0)
    for _ in range(16):
        serving.serve(13, 2, cache_ttl_s=3600.0)
    expect_outputs(serving.sched, 1.0)
    for _ in range(4):
        serving.add(4, 59, known_length=False)
    serving.run()
    assert serving.sched.departures.num_preemptions == 0
    assert serving.sched.cache.pins.num_evicted > 40


def test_a_sequence_may_take_all_pages_from_pins() -> None:
    serving = Serving(max_pinned_share=1.0, max_model_len=256)
    for _ in range(16):
        serving.serve(13, cache_ttl_s=3600.0)
    assert serving.sched.cache.pins.num_pages > 40
    seq = serving.serve(200, 56)
    assert len(seq.tokens) == 256
    assert serving.sched.departures.num_preemptions == 0


def test_short_lived_prefixes_leave_others_in_the_cache() -> None:
    serving = Serving()
    serving.serve(AGENT)
    serving.flood(cache_ttl_s=0)
    assert serving.serve([*AGENT, 8]).num_cached == 32
    assert serving.sched.cache.pins.num_pins == 0


def test_a_short_lived_request_that_is_preempted_keeps_its_pages_as_others_do() -> None:
    def ticks(*, preempted: bool) -> list[int]:
        serving = Serving()
        seq = serving.add(33, cache_ttl_s=0)
        planned = serving.sched.plan(0, 0.0)
        assert planned is not None
        if preempted:
            serving.sched.departures.preempt(seq, serving.sched.in_flight[-1], 0.0)
        serving.device.take(planned.message, repeat(3))
        serving.sched.apply(serving.device.answer(), 0.0)
        if not preempted:
            serving.sched.finish(seq, 0.0)
        return [node.tick for node in tree_nodes(serving.sched.cache) if node.page >= 0]

    assert min(ticks(preempted=True)) > 0, "it waits, and comes back"
    assert max(ticks(preempted=False)) <= 0, "they are the first to go"


def test_what_failed_is_not_pinned() -> None:
    sched = scheduler()
    seq = sequence(1, 9, cache_ttl_s=60.0)
    sched.add(seq, 0.0)
    assert sched.plan(0, 0.0) is not None
    sched.apply(StepResult(0, pack([]), (), "planted", 0.0, 0.0, (), 0.01), 0.0)
    assert sched.cache.pins.num_pages == sched.cache.num_cached == 0
    assert [event.kind for event in seq.timeline.events][-1] == "finished"
