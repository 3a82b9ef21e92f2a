"""The scheduler against a device that believes nothing: any order of events keeps every promise."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import cycle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.engine.policy import POLICIES
from asyncllm.engine.pooling import PooledParams
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.types import FinishReason, Pooling, SamplingParams
from asyncllm.wire.messages import BAD_TOKEN, PooledPrompt
from tests.support.engine.drafting import draft_for, try_all
from tests.support.engine.scheduling import (
    EOS,
    FakeDevice,
    check_books,
    expect_outputs,
    scheduler,
    sequence,
)

pytestmark = pytest.mark.slow


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(8, 32),
        slots=st.integers(1, 6),
        budget=st.integers(6, 24),
        chunk=st.integers(1, 24),
        decode_steps=st.sampled_from([1, 1, 3]),
        depth=st.integers(1, 2),
        caching=st.sampled_from([True, True, True, False]),
        host_pages=st.sampled_from([0, 4, 60]),
        states=st.sampled_from([0, 0, 0, 1, 2, 5, 30]),
        drafted=st.sampled_from([0, 0, 1, 4]),
        policy=st.sampled_from(sorted(POLICIES)),
        expected_output=st.sampled_from([0.0, 2.0, 256.0]),
    )
    def begin(
        self,
        page_size: int,
        num_pages: int,
        slots: int,
        budget: int,
        chunk: int,
        depth: int,
        caching: bool,
        decode_steps: int,
        host_pages: int,
        states: int,
        drafted: int,
        policy: str,
        expected_output: float,
    ) -> None:
        self.sched = scheduler(
            POLICIES[policy](),
            page_size=page_size,
            num_pages=num_pages,
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            prefill_chunk=chunk,
            max_decode_steps=decode_steps,
            max_model_len=num_pages * page_size,
            prefix_caching=caching,
            host_pages=host_pages if caching else 0,
            num_states=slots + states - 1 if states else 0,
            state_pages=1 + states % 4,
            page_copy_seconds=0.0,
            max_draft_tokens=drafted,
        )
        try_all(self.sched)
        expect_outputs(self.sched, expected_output)
        self.depth = depth
        self.device = FakeDevice(self.sched.limits, 0.0)
        self.live: dict[int, Sequence] = {}
        self.seen: dict[int, Sequence] = {}
        #: Of prompts that are scored: tokens whose logprobs came. The first has none.
        self.scored: defaultdict[int, int] = defaultdict(lambda: 1)
        #: Of prompts that are pooled: up to where hidden states came.
        self.pooled: defaultdict[int, int] = defaultdict(int)
        self.steps = 0
        self.now = 0.0

    @rule(
        family=st.integers(0, 3),
        prompt=st.integers(1, 30),
        own=st.integers(0, 4),
        max_tokens=st.integers(0, 12),
        scored=st.sampled_from([None, None, 2]),
        tenant=st.sampled_from(["a", "b"]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "salt"]),
        ttl=st.sampled_from([None, None, 0, 0.05, 9.0]),
    )
    def add(
        self,
        family: int,
        prompt: int,
        own: int,
        max_tokens: int,
        scored: int | None,
        tenant: str,
        priority: int,
        salt: str,
        ttl: float | None,
    ) -> None:
        """Prompts of a family begin alike."""
        id = len(self.seen) + 1
        tokens = [10 + (family * 7 + i * i) % 50 for i in range(prompt)] + [100 + id] * own
        max_tokens = min(max_tokens, self.sched.limits.max_model_len - len(tokens))
        if max_tokens < 0:
            return  # the engine refuses it
        seq = sequence(
            id,
            tokens,
            max_tokens,
            SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored),
            arrival=self.now,
            tenant=tenant,
            priority=priority,
            cache_salt=salt,
            cache_ttl_s=ttl,
        )
        if id % 3:
            draft_for(seq, random.Random(id), [3, 3, 4, 5])
        self.live[id] = self.seen[id] = seq
        self.sched.add(seq, self.now)

    @rule(
        family=st.integers(0, 3),
        prompt=st.integers(1, 30),
        pooling=st.sampled_from(["last", "mean"]),
    )
    def embed(self, family: int, prompt: int, pooling: Pooling) -> None:
        """The same prompts, of which vectors are made."""
        tokens = [10 + (family * 7 + i * i) % 50 for i in range(prompt)]
        if len(tokens) > self.sched.limits.max_model_len:
            return
        id = len(self.seen) + 1
        seq = sequence(id, tokens, 0, PooledParams(pooling=pooling), arrival=self.now)
        self.live[id] = self.seen[id] = seq
        self.sched.add(seq, self.now)

    @rule(data=st.data())
    def follow_up(self, data: st.DataObject) -> None:
        """The next turn of a chat: an earlier request's tokens and some more."""
        ended = [seq for seq in self.seen.values() if seq.state is SeqState.FINISHED]
        if not ended:
            return
        earlier = data.draw(st.sampled_from(ended))
        tokens = [*earlier.tokens, 3, 4]
        if len(tokens) + 2 > self.sched.limits.max_model_len:
            return
        id = len(self.seen) + 1
        seq = sequence(id, tokens, 2, arrival=self.now)
        self.live[id] = self.seen[id] = seq
        self.sched.add(seq, self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.sched.finish(seq, self.now)
        self.sched.finish(seq, self.now)
        assert seq.state is SeqState.FINISHED

    @precondition(lambda self: len(self.device.steps) < self.depth)
    @rule(tokens=st.lists(st.sampled_from([3, 4, 5, EOS, BAD_TOKEN]), min_size=1, max_size=4))
    def plan(self, tokens: list[int]) -> None:
        self.step(tokens)

    def step(self, tokens: list[int]) -> bool:
        self.now += 0.01
        planned = self.sched.plan(self.steps, self.now)
        if planned is None:
            assert self.device.steps or not self.live, "something runs whenever something waits"
            return False
        self.steps += 1
        self.device.take(planned.message, cycle(tokens))
        return True

    @rule(count=st.integers(1, 12), copies=st.booleans())
    def run(self, count: int, copies: bool) -> None:
        """Steps as an engine takes them."""
        for _ in range(count):
            while len(self.device.steps) < self.depth and self.step([3, 4, 5]):
                pass
            if not self.device.steps:
                return
            self.apply(copies, None)
            self.books_balance()

    @precondition(lambda self: self.device.steps)
    @rule(copies=st.booleans())
    def land(self, copies: bool) -> None:
        self.apply(copies, None)

    @precondition(lambda self: self.device.steps)
    @rule(copies=st.booleans())
    def fail(self, copies: bool) -> None:
        self.apply(copies, "planted")

    def apply(self, copies: bool, error: str | None) -> None:
        result = self.device.answer(all_copies=copies, error=error)
        emitted, failed, read = self.sched.apply(result, self.now)
        for seq, part in read:
            assert seq.id in self.live
            if isinstance(part, PooledPrompt):
                expected = self.pooled[seq.id] or seq.reads.pool_from
                assert part.start == expected, "each position once, and in order"
                self.pooled[seq.id] = part.end
                continue
            assert seq.reads.logprobs >= 0
            assert part.start <= self.scored[seq.id], "no token is left out"
            self.scored[seq.id] = max(part.end, self.scored[seq.id])
        for seq, _row, token, finish in emitted:
            assert seq.id in self.live
            if seq.reads.logprobs >= 0:
                assert self.scored[seq.id] == seq.num_prompt, "before the first token"
            if seq.reads.pool_from >= 0:
                assert self.pooled[seq.id] == seq.num_prompt, "before the end"
            if token == BAD_TOKEN or finish is not None:
                assert seq.state is SeqState.FINISHED
                del self.live[seq.id]
            if finish is FinishReason.LENGTH:
                assert len(seq.tokens) == seq.output.max_length
        for seq in failed:
            del self.live[seq.id]

    @invariant()
    def books_balance(self) -> None:
        check_books(self.sched, self.seen.values())
        running = set(self.sched.batch.running)
        assert running <= set(self.live)
        assert self.sched.backlog.num_waiting == len(self.live) - len(running)

    def teardown(self) -> None:
        """Whatever happened, what is left can be finished, and leaves nothing behind."""
        for _ in range(10_000):
            while len(self.device.steps) < self.depth and self.step([3]):
                pass
            if not self.device.steps:
                break
            self.apply(True, None)
        assert not self.live
        sched = self.sched
        assert sched.leak_check.mismatch() is None
        assert sched._copies._num_saving == 0, "else newcomers wait for copies in vain"
        assert sched.backlog.num_free_slots == sched.limits.max_num_seqs
        assert sched._admission.growth._promised == 0
        if not sched.limits.prefix_caching:
            assert sched.cache.num_cached == 0
        # Everything that is cached can be evicted: nobody has forgotten a lock.
        assert sched.cache._tree.evict(sched.cache.num_cached)
        assert sched.cache.num_free == sched.cache.num_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=60, derandomize=True)
