"""The scheduler against a model of the device: any order of events keeps every promise."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.cache.manager import KVCacheManager
from asyncllm.config import EngineLimits
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.sequence import SeqState, Sequence
from asyncllm.types import FinishReason, SamplingParams
from asyncllm.wire.messages import BAD_TOKEN, NO_TOKEN, StepPlan, unpack

EOS = 7


def limits(**changes: int) -> EngineLimits:
    numbers = {
        "num_pages": 64,
        "page_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "prefill_chunk": 32,
        "max_waiting": 100,
        "steps_in_flight": 2,
        "vocab_size": 100,
    }
    return EngineLimits(
        device="cpu", dtype="float32", eos_token_ids=(EOS,), **{**numbers, **changes}
    )


def scheduler(**changes: int) -> Scheduler:
    lim = limits(**changes)
    return Scheduler(lim, KVCacheManager(lim.num_pages, lim.page_size))


def sequence(
    id: int, num_prompt: int, max_tokens: int = 4, params: SamplingParams | None = None
) -> Sequence:
    return Sequence(
        id,
        [1] * num_prompt,
        params or SamplingParams(max_tokens=max_tokens),
        max_length=num_prompt + max_tokens,
        eos_ids=(EOS,),
        seed=0,
    )


def rows(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return [tuple(row) for row in unpack(plan.rows, 3).tolist()]


class FakeDevice:
    """Checks every plan as a device would have to believe it, and answers it."""

    def __init__(self, sched: Scheduler):
        self.sched = sched
        self.block_tables: dict[int, dict[int, int]] = {}
        self.known: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.steps: deque[list[bool]] = deque()

    def take(self, plan: StepPlan) -> None:
        lim = self.sched.limits
        for admit in plan.admits:
            self.known[admit.slot] = len(unpack(admit.tokens))
            self.block_tables[admit.slot] = {}
            self.written[admit.slot] = 0
        for slot, index, page in unpack(plan.new_pages, 3).tolist():
            assert 0 <= page < lim.num_pages
            self.block_tables[slot][index] = page
        samples = []
        seen_prefill = False
        total = 0
        slots = [slot for slot, _, _ in rows(plan)]
        assert len(slots) == len(set(slots)), "one row a sequence"
        for slot, start, q_len in rows(plan):
            assert q_len >= 1
            assert start == self.written[slot], "no gap and no repetition"
            decode = start >= self.known[slot]
            assert not (decode and seen_prefill), "decode rows come first"
            seen_prefill |= not decode
            assert q_len == 1 or start + q_len <= self.known[slot]
            assert q_len <= lim.prefill_chunk
            needed = -(-(start + q_len) // lim.page_size)
            assert all(i in self.block_tables[slot] for i in range(needed))
            self.written[slot] = start + q_len
            samples.append(start + q_len >= self.known[slot])
            total += q_len
        assert 0 < total <= lim.max_num_batched_tokens
        self.steps.append(samples)

    def answer(self, tokens: list[int]) -> list[int]:
        samples = self.steps.popleft()
        return [
            tokens[i % len(tokens)] if sampled else NO_TOKEN for i, sampled in enumerate(samples)
        ]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(16, 40),
        slots=st.integers(1, 6),
        budget=st.integers(6, 24),
        chunk=st.integers(1, 24),
        depth=st.integers(1, 2),
    )
    def begin(
        self, page_size: int, num_pages: int, slots: int, budget: int, chunk: int, depth: int
    ) -> None:
        self.sched = scheduler(
            page_size=page_size,
            num_pages=num_pages,
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            prefill_chunk=chunk,
            max_model_len=num_pages * page_size,
        )
        self.depth = depth
        self.device = FakeDevice(self.sched)
        self.live: dict[int, Sequence] = {}
        self.next_id = 0

    @rule(prompt=st.integers(1, 15), max_tokens=st.integers(1, 12))
    def add(self, prompt: int, max_tokens: int) -> None:
        max_tokens = min(max_tokens, self.sched.limits.max_model_len - prompt)
        if max_tokens < 1:
            return
        self.next_id += 1
        seq = sequence(self.next_id, prompt, max_tokens)
        self.live[seq.id] = seq
        self.sched.add(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.live)))
        seq = self.live.pop(id)
        self.sched.finish(seq)
        self.sched.finish(seq)
        assert seq.state is SeqState.FINISHED

    @precondition(lambda self: len(self.device.steps) < self.depth)
    @rule()
    def plan(self) -> None:
        plan = self.sched.plan(0)
        if plan is None:
            assert self.device.steps or not self.live, "something runs whenever something waits"
        else:
            self.device.take(plan)

    @precondition(lambda self: self.device.steps)
    @rule(tokens=st.lists(st.sampled_from([3, 4, EOS, BAD_TOKEN]), min_size=1, max_size=4))
    def land(self, tokens: list[int]) -> None:
        for seq, _row, token, finish in self.sched.apply(self.device.answer(tokens)):
            assert seq.id in self.live
            if token == BAD_TOKEN or finish is not None:
                assert seq.state is SeqState.FINISHED
                del self.live[seq.id]
            if finish is FinishReason.LENGTH:
                assert len(seq.tokens) == seq.max_length

    @precondition(lambda self: self.device.steps)
    @rule()
    def fail(self) -> None:
        self.device.steps.popleft()
        for seq in self.sched.fail():
            del self.live[seq.id]

    @invariant()
    def books_balance(self) -> None:
        cache = self.sched.cache
        holders = [seq for seq in self.all_sequences() if seq.pages]
        held = [page for seq in holders for page in seq.pages]
        assert len(held) == len(set(held)), "no page in two block tables"
        assert cache.num_held == len(held)
        assert cache.num_free + cache.num_held + cache.num_cached == cache.num_pages
        assert not set(self.sched.waiting) & set(self.sched.running)
        assert set(self.live) == set(self.sched.waiting) | set(self.sched.running)

    def all_sequences(self) -> list[Sequence]:
        in_flight = {seq.id: seq for step in self.sched._in_flight for seq, _ in step}
        return list({**in_flight, **self.live}.values())

    def teardown(self) -> None:
        """Whatever happened, what is left can be finished, and leaves nothing behind."""
        for _ in range(10_000):
            while len(self.device.steps) < self.depth and (plan := self.sched.plan(0)):
                self.device.take(plan)
            if not self.device.steps:
                break
            for seq, _row, _token, finish in self.sched.apply(self.device.answer([3])):
                if finish is not None:
                    del self.live[seq.id]
        assert not self.live
        assert self.sched.cache.num_free == self.sched.cache.num_pages
        assert len(self.sched._free_slots) == self.sched.limits.max_num_seqs


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, derandomize=True
)


def test_decode_rows_come_first_and_prompts_share_what_is_left() -> None:
    sched = scheduler(max_num_batched_tokens=20, max_num_seqs=4)
    sched.add(sequence(1, 6))
    assert rows(sched.plan(0)) == [(0, 0, 6)]
    sched.add(sequence(2, 12))
    sched.add(sequence(3, 12))
    assert rows(sched.plan(1)) == [(0, 6, 1), (1, 0, 12), (2, 0, 7)]
    assert rows(sched.plan(2)) == [(0, 7, 1), (1, 12, 1), (2, 7, 5)]


def test_chunks_are_bounded_and_only_the_last_samples() -> None:
    sched = scheduler(prefill_chunk=4)
    sched.add(sequence(1, 10))
    assert rows(sched.plan(0)) == [(0, 0, 4)]
    assert rows(sched.plan(1)) == [(0, 4, 4)]
    assert rows(sched.plan(2)) == [(0, 8, 2)]
    assert sched.apply([NO_TOKEN]) == []
    assert sched.apply([NO_TOKEN]) == []
    [emitted] = sched.apply([3])
    assert emitted.token == 3


def test_nothing_is_scheduled_past_max_tokens() -> None:
    sched = scheduler()
    sched.add(sequence(1, 3, max_tokens=2))
    assert sched.plan(0)
    assert sched.plan(1)
    assert sched.plan(2) is None
    assert sched.apply([3])[0].finish is None
    assert sched.apply([3])[0].finish is FinishReason.LENGTH
    assert sched.cache.num_held == 0


def test_the_row_after_an_end_of_sequence_is_discarded() -> None:
    sched = scheduler()
    seq = sequence(1, 3, max_tokens=9)
    sched.add(seq)
    sched.plan(0)
    sched.plan(1)
    assert sched.apply([EOS])[0].finish is FinishReason.STOP
    assert sched.cache.num_held > 0, "a step in flight still writes there"
    assert sched.apply([5]) == []
    assert sched.cache.num_held == 0
    assert seq.tokens[-1] == EOS


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        (SamplingParams(max_tokens=5), True),
        (SamplingParams(max_tokens=5, ignore_eos=True), False),
        (SamplingParams(max_tokens=5, min_tokens=2), False),
        (SamplingParams(max_tokens=5, stop_token_ids=(EOS,), ignore_eos=True), True),
    ],
)
def test_which_tokens_stop(params: SamplingParams, ends: bool) -> None:
    sched = scheduler()
    sched.add(sequence(1, 3, max_tokens=5, params=params))
    sched.plan(0)
    assert (sched.apply([EOS])[0].finish is FinishReason.STOP) == ends


def test_the_youngest_is_preempted_and_comes_back_with_its_tokens() -> None:
    sched = scheduler(num_pages=6, page_size=2, max_model_len=12)
    old, young = sequence(1, 4, max_tokens=8), sequence(2, 3, max_tokens=8)
    sched.add(old)
    sched.add(young)
    finished = []
    for step in range(40):
        if sched.plan(step) is None:
            break
        finished += [e.seq.id for e in sched.apply([3, 3][: len(sched._in_flight[0])]) if e.finish]
    assert finished == [1, 2]
    assert sched.num_preemptions >= 1
    assert len(young.tokens) == 11
    assert sched.cache.num_free == 6
