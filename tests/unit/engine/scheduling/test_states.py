"""Recurrent states: who begins where, and that nobody begins with a state that is not its own.

The fake device checks each state that a plan reads: it must have taken in exactly the tokens before
the row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, repeat
from typing import Any

import pytest

from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.types import SamplingParams
from asyncllm.wire.messages import NO_TOKEN, StepPlan, unpack
from tests.support.engine.drafting import draft_for, try_all
from tests.support.engine.scheduling import (
    FakeDevice,
    check_books,
    expect_outputs,
    rows,
    scheduler,
    sequence,
)

PAGE = 4
SPACING = 4 * PAGE


class Served:
    """A scheduler and its device, with two steps in flight; all outputs are fours by default."""

    def __init__(self, num_states: int = 40, **changes: Any):
        numbers: dict[str, Any] = {
            "num_pages": 512,
            "max_model_len": 1024,
            "max_num_batched_tokens": 512,
        }
        numbers |= {"prefill_chunk": 512, "page_size": PAGE} | changes
        self.sched: Scheduler = scheduler(num_states=num_states, **numbers)
        expect_outputs(self.sched, 8.0)
        self.device = FakeDevice(self.sched.limits)
        self.outputs: Iterator[int] = repeat(4)
        self.step = 0
        self.seen: list[Sequence] = []
        self.num_copies = 0
        #: Positions computed, prompts and outputs.
        self.num_computed = 0

    def add(
        self, tokens: list[int], max_tokens: int = 4, *, shared: int = 0, **scheduling: Any
    ) -> Sequence:
        """``shared``: how many tokens others are likely to have."""
        seq = sequence(len(self.seen) + 1, tokens, max_tokens, **scheduling)
        seq.kv.shared = shared
        self.seen.append(seq)
        self.sched.add(seq, 0.0)
        return seq

    def plan(self) -> bool:
        planned = self.sched.plan(self.step, 0.01 * self.step)
        if planned is None:
            return False
        self.step += 1
        self.num_copies += len(unpack(planned.message.state_copies, 2))
        self.num_computed += sum(row[2] for row in rows(planned.message))
        self.device.take(planned.message, self.outputs)
        return True

    def land(self, error: str | None = None) -> None:
        self.sched.apply(self.device.answer(error=error), 0.01 * self.step)
        if not isinstance(self.device, Light):  # each check looks at all pages
            check_books(self.sched, self.seen)

    def run(self) -> None:
        """Until nothing is left to do."""
        while True:
            while len(self.device.steps) < 2 and self.plan():
                pass
            if not self.device.steps:
                break
            self.land()
        assert all(seq.state is SeqState.FINISHED for seq in self.seen)
        assert self.sched.leak_check.mismatch() is None

    def serve(self, tokens: list[int], max_tokens: int = 4, **scheduling: Any) -> Sequence:
        seq = self.add(tokens, max_tokens, **scheduling)
        self.run()
        return seq


def words(start: int, count: int) -> list[int]:
    return [100 + start * 1000 + i for i in range(count)]


def test_the_next_turn_begins_close_to_the_end_of_the_last_answer() -> None:
    served = Served()
    first = served.serve(words(1, 50), 60)
    again = served.serve([*first.tokens, *words(2, 5)])
    assert 110 - SPACING - 1 <= again.num_cached <= 110
    assert again.num_cached % PAGE == 0


def test_an_answer_that_the_next_turn_does_not_have_costs_no_more_than_itself() -> None:
    """A template may leave reasoning out, and ask for an answer in words that it does not print."""
    served = Served()
    prompt = words(1, 100)
    served.serve(prompt, 60)
    again = served.serve([*prompt[:-5], *words(2, 50)])
    assert 100 - 8 - PAGE <= again.num_cached <= 95


def test_chats_whose_answers_come_back_in_other_words_find_their_last_prompt() -> None:
    """Each turn computes known tokens again, behind which its own pages are found all the same."""
    served = Served()
    prompt = words(0, 100)
    for turn in range(1, 6):
        seq = served.serve(prompt, 40)
        assert seq.num_cached >= len(prompt) - 20 - 8 - 40 - PAGE or turn == 1
        prompt = [*prompt, *seq.tokens[-40:-20], *words(2 * turn, 20), *words(2 * turn + 1, 20)]
    assert served.sched.cache.states.num_evicted == 0


def test_a_sequence_that_needs_all_pages_holds_none_twice() -> None:
    served = Served(num_pages=50, max_model_len=200)
    shared = words(0, 101)
    served.serve([*shared, *words(1, 20)])
    seq = served.serve([*shared, *words(2, 90)], 9)
    assert len(seq.tokens) == 200
    assert served.sched.departures.num_preemptions == 0


def test_where_the_only_checkpoint_is_not_shared_the_next_one_is() -> None:
    """Prompts with a beginning in common: the second finds where they part, the third begins there.

    What follows it is short: a checkpoint at the end alone would be of no use to others.
    """
    for own in (20, 100):
        served = Served()
        shared = words(0, 101)
        assert served.serve([*shared, *words(1, own)]).num_cached == 0
        assert served.serve([*shared, *words(2, own)]).num_cached == 0
        assert served.serve([*shared, *words(3, own)]).num_cached == 100
        assert served.serve([*shared, *words(4, own)]).num_cached == 100


def test_of_equal_prompts_at_once_one_is_computed_and_the_others_copy_its_state() -> None:
    served = Served()
    prompt = words(1, 400)
    siblings = [served.add(prompt, 8) for _ in range(4)]
    served.run()
    assert [seq.num_cached for seq in siblings] == [0, *[388] * 3]
    assert served.num_computed <= 400 + 3 * 12 + 4 * 9


@pytest.mark.parametrize("budget", [100, 512], ids=["in chunks", "at once"])
@pytest.mark.parametrize("own", [20, 100, 300])
def test_newcomers_with_a_common_beginning_compute_it_once(budget: int, own: int) -> None:
    """The first one's state is kept where those that wait leave its path."""
    served = Served(max_num_batched_tokens=budget, num_states=60)
    shared = words(0, 401)
    seqs = [served.add([*shared, *words(i, own)]) for i in range(1, 8)]
    served.run()
    assert [seq.num_cached for seq in seqs] == [0, *[400] * 6]


def test_one_that_comes_later_also_finds_where_it_leaves_what_is_being_computed() -> None:
    served = Served(max_num_batched_tokens=100)
    shared = words(0, 401)
    first = served.add([*shared, *words(1, 50)])
    for _ in range(2):
        served.plan()
        served.land()
    later = [served.add([*shared[:depth], *words(i, 40)]) for i, depth in ((2, 401), (3, 330))]
    served.run()
    assert [seq.num_cached for seq in (first, *later)] == [0, 400, 328]


def test_where_a_system_prompt_ends_is_known_before_a_second_chat_comes() -> None:
    """The first is in one step, alone; the others come while that runs, or much later."""
    served = Served()
    shared = words(0, 401)
    chats = [[*shared, *words(i, 60)] for i in range(1, 6)]
    first = served.add(chats[0], shared=401)
    served.plan()
    later = [served.add(chat, shared=401) for chat in chats[1:4]]
    served.run()
    last = served.serve(chats[4], shared=401)
    assert [seq.num_cached for seq in (first, *later, last)] == [0, *[400] * 4]
    short = served.serve(words(9, 100), shared=12)
    assert len([event for event in short.timeline.events if event.kind == "chunk"]) == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_takes_no_page_while_it_waits_to_know_where_its_state_is(seed: int) -> None:
    """Alone, it has no step then that would tell the page to the device."""
    served = Served(max_draft_tokens=4)
    try_all(served.sched)
    seq = draft_for(served.add(words(1, 10), 200), random.Random(seed), [4, 4, 5])
    served.run()
    assert len(seq.tokens) == 210
    assert served.num_computed > 230, "drafts were wrong"


def test_of_many_forks_a_prompt_has_no_more_than_two_chunks() -> None:
    served = Served(num_states=60)
    shared = words(0, 401)
    seqs = [served.add([*shared[: 40 * i], *words(i, 30)]) for i in range(10, 0, -1)]
    served.run()
    chunks = [[e for e in seq.timeline.events if e.kind == "chunk"] for seq in seqs]
    assert max(map(len, chunks)) <= 4
    other = served.add([*shared, *words(30, 20)], cache_salt="salt")
    salted = served.add([*shared, *words(31, 20)], cache_salt="other")
    served.run()
    assert other.num_cached == salted.num_cached == 0


def test_a_waiting_sequence_goes_on_when_the_one_that_promised_ends_before() -> None:
    """No step is in flight any more then, so that nothing else would wake it."""
    served = Served(max_num_batched_tokens=40)
    prompt = words(1, 200)
    first = served.add(prompt)
    while not first.slot >= 0 or served.sched.batch.computed[first.slot] < 188:
        assert served.plan()
        served.land()
    second = served.add(prompt)
    assert not served.plan() or second.slot < 0
    while served.device.steps:
        served.land()
    third = served.add([*words(1, 180), *words(2, 20)])
    served.sched.finish(first, 0.0)
    served.run()
    assert second.num_cached == 188, "its state was there without a copy"
    assert third.num_cached == 0
    assert len(third.tokens) == 204


def test_aborted_while_it_waits_for_a_state_it_leaves_nothing() -> None:
    served = Served(max_num_batched_tokens=40)
    prompt = words(1, 200)
    served.add(prompt)
    waiting = [served.add(prompt) for _ in range(3)]
    for _ in range(3):
        served.plan()
        served.land()
    for seq in waiting[:2]:
        served.sched.finish(seq, 0.0)
    served.run()
    assert waiting[2].num_cached == 188
    assert served.sched.cache.states.num_taken == 0


@pytest.mark.parametrize("spare", [0, 1, 2, 5])
@pytest.mark.parametrize("host_pages", [0, 30, 500])
def test_a_then_b_then_a_again_and_each_has_its_own_state(spare: int, host_pages: int) -> None:
    """With few slots for checkpoints, which are reused at once, as are pages of the host."""
    options = {"num_pages": 60, "host_pages": host_pages, "page_copy_seconds": 0.0}
    served = Served(2 + spare, max_num_seqs=2, state_pages=4, **options)
    served.device.copy_seconds = 0.0
    a, b = words(1, 90), words(2, 90)
    for _ in range(3):
        for prompt in (a, b, [*a[:50], *b[:40]]):
            served.add(prompt, 30)
            served.add(prompt[:70], 20)
        served.run()


def test_after_a_preemption_a_sequence_goes_on_from_its_deepest_checkpoint() -> None:
    served = Served(max_num_batched_tokens=200)
    seq = served.add(words(1, 150), 100)
    while len(seq.tokens) < 225:
        served.plan()
        served.land()
    served.add(words(2, 5), 50)
    served.plan()
    served.sched.departures.preempt(seq, served.sched.in_flight[-1], 0.0)
    before = served.num_computed
    served.run()
    assert served.num_computed - before <= (250 - 208) + 60


@pytest.mark.parametrize("budget", [50, 101, 200])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_a_prompt_that_is_preempted_computes_next_to_nothing_again(budget: int, steps: int) -> None:
    """Chunks end with a page, so that the state goes to the tree as it is, without a copy."""
    served = Served(max_num_batched_tokens=budget)
    seq = served.add(words(1, 900), 5)
    for _ in range(steps):
        served.plan()
        served.land()
    done = int(served.sched.batch.computed[seq.slot])
    served.add(words(2, 5), 5)
    served.plan()
    served.sched.departures.preempt(seq, served.sched.in_flight[-1], 0.0)
    before = served.num_computed
    served.run()
    assert done >= steps * (budget - PAGE)
    assert served.num_computed - before <= 905 - done + 10


@pytest.mark.parametrize("failing", range(6))
def test_no_state_of_a_step_that_failed_is_kept(failing: int) -> None:
    """The fake device knows which steps each state depends on."""
    served = Served(max_num_batched_tokens=60)
    prompt = words(1, 120)
    served.add(prompt, 10)
    served.add(words(2, 90), 10)
    for number in range(8):
        while len(served.device.steps) < 2 and served.plan():
            pass
        served.land("planted" if number == failing else None)
    served.add(prompt, 10)
    served.add([*prompt[:80], *words(3, 20)], 10)
    served.run()


class Light(FakeDevice):
    """For long chats: it believes all that it is told."""

    def _run(self, slot: int, start: int, q_len: int, sample: Iterator[int]) -> int:
        if start + q_len < self.known[slot]:
            return NO_TOKEN
        self.tokens[slot].append(token := next(sample))
        return token

    def _copy_states(self, plan: StepPlan) -> None:
        pass

    def _run_states(self, plan: StepPlan, settled: list[tuple[int, int, int]]) -> None:
        pass


def chat(served: Served, seed: int, num_chats: int = 4, *, thinks: bool = False) -> tuple[int, int]:
    """Chats of eight turns, interleaved; tokens of prompts, and those found.

    Args:
        thinks: the next turn has only the second half of each answer.
    """
    rng = random.Random(seed)
    served.device, served.outputs = Light(served.sched.limits), count(10**6)
    system = words(0, 60)
    chats = [[*system, *words(i, 20)] for i in range(1, num_chats + 1)]
    prompts = found = 0
    for turn in range(8):
        for i, tokens in enumerate(chats):
            seq = served.serve(tokens, rng.randint(10, 60))
            prompts += seq.num_prompt
            found += seq.num_cached
            said = seq.tokens[seq.num_prompt + thinks * seq.num_output // 2 :]
            chats[i] = [*tokens, *said, *words(10 * turn + i, rng.randint(5, 40))]
    return prompts, found


def test_chats_of_many_turns_find_nine_tenths_of_what_pages_alone_would_give() -> None:
    _, with_states = chat(Served(num_states=30, num_pages=2048), 1)
    _, without = chat(Served(num_states=0, num_pages=2048), 1)
    assert with_states >= 0.9 * without


@pytest.mark.parametrize(("thinks", "slots"), [(False, 12), (True, 11)])
def test_few_slots_are_kept_for_the_ends_of_chats(thinks: bool, slots: int) -> None:
    """Two for each chat, and a third where it is of use: what a longer one replaced goes first."""
    found = []
    for num_states in (200, 1 + slots):
        served = Served(num_states=num_states, max_num_seqs=1, num_pages=2048)
        for seed in (3, 4):
            chat(served, seed, 1, thinks=thinks)
        found.append(chat(served, 2, thinks=thinks)[1])
    assert found[1] >= 0.95 * found[0]


def test_a_common_beginning_stays_while_one_of_its_chats_goes_on_and_on() -> None:
    served = Served(num_states=6, max_num_seqs=1)
    served.device = Light(served.sched.limits)
    shared = words(0, 100)
    for i in range(1, 5):
        seq = served.serve([*shared, *words(i, 40)])
    assert seq.num_cached == 100
    chat = seq.tokens
    for turn in range(5, 11):
        chat = served.serve([*chat, *words(turn, 30)], 30).tokens
    assert served.sched.cache.states.num_evicted > 0
    assert served.serve([*shared, *words(30, 40)]).num_cached == 100


def test_a_pinned_prefix_keeps_its_state_through_a_crowd_of_others() -> None:
    served = Served(num_states=6, max_num_seqs=2)
    served.device = Light(served.sched.limits)
    pinned = served.serve(words(1, 100), cache_ttl_s=1000.0)
    plain = served.serve(words(2, 100))
    for i in range(3, 12):
        served.serve(words(i, 100))
    assert served.serve([*pinned.tokens, 5]).num_cached == 88
    assert served.serve([*plain.tokens, 5]).num_cached == 0


def test_what_nobody_wants_again_pushes_nothing_out() -> None:
    served = Served(num_states=3, max_num_seqs=1)
    first = served.serve(words(1, 100), 1)
    for i in range(2, 8):
        served.serve(words(i, 100), 30, cache_ttl_s=0)
    assert served.serve([*first.tokens, *words(2, 8)], 1).num_cached == 88


def test_prompts_whose_logprobs_are_wanted_begin_at_zero() -> None:
    served = Served()
    prompt = words(1, 100)
    served.serve(prompt)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    seq = sequence(2, prompt, 2, params)
    served.seen.append(seq)
    served.sched.add(seq, 0.0)
    served.run()
    assert seq.num_cached == 0


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_several_tokens_in_one_step_stop_where_a_state_is_kept(decode_steps: int) -> None:
    served = Served(max_decode_steps=decode_steps)
    first = served.serve(words(1, 41), 100)
    again = served.serve([*first.tokens, *words(2, 10)])
    assert again.num_cached >= 141 - SPACING - decode_steps


# -- in the host's memory ------------------------------------------------------------------------


def with_host(host_pages: int = 2000, **changes: Any) -> Served:
    """Copies take no time, so that loading is always worth it."""
    numbers = {"num_states": 6, "max_num_seqs": 2, "num_pages": 60, "max_model_len": 200}
    numbers |= {"host_pages": host_pages, "state_pages": 5, "page_copy_seconds": 0.0} | changes
    served = Served(**numbers)
    served.device.copy_seconds = 0.0
    return served


def turns(served: Served, num_chats: int, num_turns: int, seed: int = 0) -> list[int]:
    """Chats in turns; how much each found of what its last turn had."""
    rng = random.Random(seed)
    chats = [words(i, rng.randint(40, 90)) for i in range(1, num_chats + 1)]
    missed = []
    for turn in range(num_turns):
        for i, tokens in enumerate(chats):
            seq = served.serve(tokens, 12)
            if turn:
                missed.append(len(tokens) - seq.num_cached)
            chats[i] = [*seq.tokens, *words(10 * turn + i, 6)]
    return missed


def test_what_the_device_has_no_room_for_comes_back_from_the_host() -> None:
    served = with_host()
    missed = turns(served, 8, 4)
    assert max(missed) <= 6 + SPACING + 2 * PAGE
    states = served.sched.cache.states
    assert states.num_evicted == 0
    assert states.num_on_host >= 8
    assert served.sched.cache.num_dropped == 0


def test_states_and_pages_of_the_host_give_way_by_their_last_use() -> None:
    """Room for some of the chats: those that are used last are found, with their states."""
    served = with_host(host_pages=160, num_states=4, num_pages=50)
    chats = [served.serve(words(i, 60), 4).tokens for i in range(1, 13)]
    found = [served.serve([*tokens, 5], 1).num_cached for tokens in reversed(chats)]
    assert found[:3] == [48] * 3, "the end of the prompt"
    assert found[-3:] == [0] * 3
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_with_few_slots_copies_leave_enough_for_all_sequences(spare: int) -> None:
    served = with_host(num_states=2 + spare, num_pages=100)
    for turn in range(3):
        for i in range(1, 7):
            served.add([*words(i, 60), *words(20 + turn, 10)], 9)
            served.add([*words(i, 30), *words(30 + turn, 30)], 9)
        served.run()


def test_whoever_waits_for_a_state_that_is_loaded_shares_it_and_may_go() -> None:
    served = with_host()
    prompt = words(1, 80)
    served.serve(prompt)
    for i in range(2, 9):
        served.serve(words(i, 80))
    first, second, third = (served.add([*prompt, 5], 4) for _ in range(3))
    assert served.plan()
    assert first.state is SeqState.LOADING
    served.sched.finish(first, 0.0)
    served.sched.finish(second, 0.0)
    served.run()
    assert third.num_cached == 68
    assert served.sched.cache.states.num_taken == 0


def test_a_state_that_is_dropped_while_it_is_copied_is_not_waited_for() -> None:
    served = with_host()
    states = served.sched.cache.states
    dropped = 0
    for i in range(1, 13):
        served.add(words(i, 80), 30)
        while served.plan() or served.device.steps:
            for checkpoint in list(states._locked):  # type: ignore[attr-defined]
                if checkpoint.node is not None and checkpoint.ready:
                    states.forget([checkpoint.node])
                    dropped += 1
            served.land()
    assert dropped > 3
    assert served.sched._copies._num_saving == 0


def test_a_state_that_computing_is_faster_than_is_left_where_it_is() -> None:
    served = with_host(page_copy_seconds=10.0)
    served.device.copy_seconds = 10.0
    prompt = words(1, 80)
    for i in (1, *range(2, 9), 1):
        seq = served.serve(words(i, 80))
    assert seq.num_cached == 0
    assert served.sched.cache.states.num_on_host > 0
    assert len(prompt) == seq.num_prompt


def test_a_model_without_states_has_none_in_its_plans() -> None:
    served = Served(num_states=0)
    served.add(words(1, 100))
    planned = served.sched.plan(0, 0.0)
    assert planned is not None
    assert (planned.message.state_slots, planned.message.state_copies) == (b"", b"")
