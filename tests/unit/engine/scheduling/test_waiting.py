"""The waiting queue against lists that are searched: whose turn it is, and who pays for it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.engine.cache.lazy_heap import LazyHeap
from asyncllm.engine.policy import LAST, POLICIES, Fair, LongestFirst, Policy, Ranked
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import FOREVER, SeqState, Sequence
from asyncllm.engine.scheduling.waiting.queue import WaitingQueue
from asyncllm.wire.messages import StepResult, pack
from tests.support.engine.scheduling import rows, scheduler, sequence


class Shares(Policy):
    """First come, first served within each tenant."""

    def account(self, request: Ranked) -> str:
        return request.tenant


class QueueMachine(RuleBasedStateMachine):
    """Charges are small integers, so that sums are exact and accounts are often level."""

    def __init__(self) -> None:
        super().__init__()
        self.num_sequences = 0
        self.waiting: dict[int, Sequence] = {}
        self.places: dict[str, list[tuple[float, int]]] = {}  # of those with a deadline
        self.served: dict[str, float] = {}
        self.level = 0.0
        self.last_cost = 0
        self.gone: list[Sequence] = []

    @initialize(policy=st.sampled_from([*POLICIES.values(), Shares]))
    def begin(self, policy: type[Policy]) -> None:
        self.policy = policy()
        self.queue = WaitingQueue(self.policy)

    def account(self, seq: Sequence) -> str:
        return self.policy.account(seq.service)

    def rank(self, seq: Sequence) -> float:
        return self.policy.rank(seq.service, len(seq.tokens))

    def num_active(self) -> int:
        return len({self.account(seq) for seq in self.waiting.values()})

    def push(self, seq: Sequence) -> None:
        name = self.account(seq)
        if not any(self.account(other) == name for other in self.waiting.values()):
            self.served[name] = max(self.served.get(name, self.level), self.level)
        self.waiting[seq.id] = seq
        if seq.service.deadline < FOREVER:
            self.places.setdefault(name, []).append((self.rank(seq), seq.id))
        self.queue.push(seq)

    def leave(self, seq: Sequence, *, served: bool) -> None:
        del self.waiting[seq.id]
        self.gone.append(seq)
        if seq.service.deadline < FOREVER:
            places = sorted(self.places[self.account(seq)])
            behind = [place for place in places if place >= (self.rank(seq), seq.id)]
            taken = places[0] if served else [*behind, places[-1]][0]
            self.places[self.account(seq)].remove(taken)

    def first(self, mine: list[Sequence]) -> Sequence:
        """The next of one account."""
        timely = [seq for seq in mine if seq.service.deadline < FOREVER]
        others = [(self.rank(seq), seq.id) for seq in mine if seq.service.deadline == FOREVER]
        if timely and min(self.places[self.account(timely[0])]) < min([*others, (LAST, 0)]):
            return min(timely, key=lambda seq: (seq.service.deadline, seq.id))
        return self.waiting[min(others)[1]]

    def turns(self) -> list[Sequence]:
        """Those whose turn it may be, by brute force: there can be several among equals."""
        if not self.waiting:
            return []
        least = min(self.served[self.account(seq)] for seq in self.waiting.values())
        turns = []
        for name in {self.account(seq) for seq in self.waiting.values()}:
            if self.served[name] == least:
                mine = [seq for seq in self.waiting.values() if self.account(seq) == name]
                turns.append(self.first(mine))
        return turns

    @rule(
        count=st.integers(1, 6),
        prompt=st.integers(1, 3),
        tenant=st.sampled_from("aabc"),
        priority=st.integers(-1, 1),
        arrival=st.integers(0, 3),
        deadline=st.sampled_from([None, None, 1.0, 1000.0]),
    )
    def arrive(
        self,
        count: int,
        prompt: int,
        tenant: str,
        priority: int,
        arrival: int,
        deadline: float | None,
    ) -> None:
        for _ in range(count):
            self.num_sequences += 1
            self.push(
                sequence(
                    self.num_sequences,
                    prompt,
                    arrival=float(arrival),
                    tenant=tenant,
                    priority=priority,
                    deadline_ms=deadline,
                )
            )

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def remove(self, which: int) -> None:
        seq = list(self.waiting.values())[which % len(self.waiting)]
        self.queue.remove(seq)
        self.leave(seq, served=False)

    @rule(count=st.integers(1, 8), cost=st.integers(0, 4))
    def serve(self, count: int, cost: int) -> None:
        for _ in range(count):
            seq = self.queue.peek()
            if seq is None:
                return
            assert seq in self.turns()
            name = self.account(seq)
            level = self.served[name]
            if self.num_active() > 1 or len(self.waiting) == 1:
                level = max(level, self.level + self.last_cost / self.num_active())
            self.last_cost = cost
            self.served[name] += cost
            self.queue.serve(seq, float(cost))
            self.leave(seq, served=True)
            left = {self.account(other) for other in self.waiting.values()} or {name}
            self.level = min(level, max(self.served[account] for account in left))

    @precondition(lambda self: self.gone)
    @rule(which=st.integers(0, 99), cost=st.integers(-4, 4), again=st.booleans())
    def settle(self, which: int, cost: int, again: bool) -> None:
        """What it cost is known now; it may have to wait once more."""
        seq = self.gone.pop(which % len(self.gone))
        charged = seq.place.charged
        self.queue.shares.charge(seq, float(cost))
        assert seq.place.charged == charged + cost
        name = self.account(seq)
        self.served[name] = self.served.get(name, self.level) + cost
        if again:
            self.push(seq)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "queue"):
            return
        turns, first = self.turns(), self.queue.peek()
        assert first in turns if turns else first is None
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_tokens == sum(len(seq.tokens) for seq in self.waiting.values())
        assert all(seq in self.queue for seq in self.waiting.values())
        assert not any(seq in self.queue for seq in self.gone)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.serve(len(self.waiting) + 1, 2)
            assert self.queue.peek() is None
            assert (len(self.queue), self.queue.num_tokens) == (0, 0)


TestQueueMachine = pytest.mark.slow(QueueMachine.TestCase)
TestQueueMachine.settings = settings(max_examples=120, stateful_step_count=40, derandomize=True)


def serve(queue: WaitingQueue, cost: float) -> Sequence:
    seq = queue.peek()
    assert seq is not None
    queue.serve(seq, cost)
    return seq


def test_equals_are_served_in_the_order_in_which_they_came() -> None:
    queue = WaitingQueue(LongestFirst())
    for id in range(1000):
        queue.push(sequence(id, 1 + id % 7, 5))
    served = [serve(queue, 1.0) for _ in range(1000)]
    assert [seq.id for seq in served] == list(range(1000))


def test_an_idle_account_gets_no_credit() -> None:
    queue = WaitingQueue(Fair())
    for id in range(200):
        queue.push(sequence(id, 1, tenant="busy"))
    for _ in range(100):
        serve(queue, 10.0)
    for id in range(200, 250):
        queue.push(sequence(id, 1, tenant="idle"))
    tenants = [serve(queue, 10.0).service.tenant for _ in range(40)]
    assert tenants.count("idle") in (20, 21), "no more than its share from now on"


def test_one_who_asks_for_ten_times_as_much_gets_no_more() -> None:
    rng, queue = random.Random(0), WaitingQueue(Fair())
    tenants = ["greedy"] * 2000 + [f"modest {i}" for i in range(10) for _ in range(200)]
    rng.shuffle(tenants)
    for id, tenant in enumerate(tenants):
        queue.push(sequence(id, 1, tenant=tenant))
    got = dict.fromkeys(tenants, 0.0)
    for _ in range(1000):
        cost = rng.uniform(1, 100)
        got[serve(queue, cost).service.tenant] += cost
    assert max(got.values()) - min(got.values()) <= 100.0, "at most one request apart"


def test_thousands_of_accounts_take_turns_and_are_forgotten() -> None:
    queue, count = WaitingQueue(Fair()), 3000
    for round in range(3):
        for i in range(count):
            queue.push(sequence(round * count + i, 1, tenant=str(i)))
    for _ in range(3):
        turn = {serve(queue, 2.0).service.tenant for _ in range(count)}
        assert len(turn) == count, "everybody once"
    assert queue.peek() is None


@pytest.mark.parametrize("backlog", [0, 1, 50])
def test_accounts_that_come_once_are_forgotten_and_starve_nobody(backlog: int) -> None:
    """So many of them wait at any time, beside one account that was served before."""
    queue = WaitingQueue(Fair())
    for id in (1, 2):
        queue.push(sequence(id, 1, tenant="regular"))
    assert serve(queue, 5.0).id == 1
    waited = 0
    for i in range(3, 20_000):
        queue.push(sequence(i, 1, tenant=f"passing {i}"))
        if i > backlog + 2 and serve(queue, 1.0).id == 2:
            waited = i
    assert 0 < waited <= 20 * (backlog + 2), "it costs as much as five of them"
    assert len(queue.shares._accounts) <= 1024
    assert len(queue.shares._order._entries) <= 1024


def test_corrections_while_nobody_waits_give_newcomers_no_credit() -> None:
    """Many tenants are charged for long outputs, and get most of it back when all are served."""
    queue, tenants = WaitingQueue(Fair()), [f"tenant {i}" for i in range(50)]
    for id in range(250):
        queue.push(sequence(id, 1, tenant=tenants[id % 50]))
    served = [serve(queue, 500.0) for _ in range(250)]
    for seq in served:
        queue.shares.charge(seq, -490.0)
    for id in range(1000, 1300):
        queue.push(sequence(id, 1, tenant="new"))
        queue.push(sequence(1000 + id, 1, tenant=tenants[id % 10]))
    turns = [serve(queue, 10.0).service.tenant for _ in range(110)]
    assert turns.count("new") <= 11, "one of eleven"


def test_a_swept_account_begins_level() -> None:
    queue = WaitingQueue(Fair())
    queue.push(sequence(0, 1, tenant="old"))
    serve(queue, 1.0)
    for i in range(1, 1000):
        queue.push(sequence(i, 1, tenant="busy"))
        serve(queue, 5.0)
        queue.push(sequence(1000 + i, 1, tenant=f"passing {i}"))
        serve(queue, 5.0)
    assert "old" not in queue.shares._accounts
    for id in range(3000, 3100):
        queue.push(sequence(id, 1, tenant="busy"))
        queue.push(sequence(1000 + id, 1, tenant="old"))
    tenants = [serve(queue, 5.0).service.tenant for _ in range(50)]
    assert 24 <= tenants.count("old") <= 27


@pytest.mark.parametrize("waiting", [10, 10_000])
def test_the_work_per_step_does_not_grow_with_the_number_waiting(
    waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: looks at entries of the heaps, while the head is served and others come and go."""
    looks = 0
    create = LazyHeap.__init__

    def counting(heap: LazyHeap[Any], current: Callable[[float, Any], bool]) -> None:
        def counted(rank: float, item: object) -> bool:
            nonlocal looks
            looks += 1
            return current(rank, item)

        create(heap, counted)

    monkeypatch.setattr(LazyHeap, "__init__", counting)
    queue = WaitingQueue(Fair())
    for id in range(waiting):
        queue.push(sequence(id, 1, tenant=str(id % 5), arrival=float(id)))
    looks = 0
    for id in range(waiting, waiting + 1000):
        serve(queue, 1.0)
        leaver = sequence(id, 1, tenant=str(id % 5), arrival=float(id))
        queue.push(leaver)
        queue.remove(leaver)
        queue.push(sequence(id + 100_000, 1, tenant=str(id % 5), arrival=float(id)))
        assert queue.peek() is not None
    assert looks <= 20 * 1000


def test_what_left_the_queue_of_a_busy_account_is_let_go() -> None:
    queue = WaitingQueue(Policy())
    for id in range(100):
        queue.push(sequence(id, 1, arrival=float(id)))
    for id in range(100, 20_000):
        late = sequence(id, 1, arrival=float(id))
        queue.push(late)
        queue.remove(late)
    del late
    assert alive(Sequence) <= 100 + 2 * 101 + 64


def test_what_left_an_idle_account_is_let_go() -> None:
    queue = WaitingQueue(Fair())
    before = alive(Sequence)
    for i in range(50):
        aborted = [sequence(100 * i + j, 1, tenant=str(i)) for j in range(20)]
        for seq in aborted:
            queue.push(seq)
        for seq in aborted:
            queue.remove(seq)
    del aborted, seq
    assert len(queue) == 0
    assert alive(Sequence) - before <= 64


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


# -- what admission makes of it --------------------------------------------------------------------


def answer(sched: Scheduler, step: int, num_rows: int, now: float, *, copied: bool) -> None:
    done = ((step, 0.0),) if copied else ()
    sched.apply(StepResult(step, pack([3] * num_rows), (), None, 0.0, 0.0, done, 0.01), now)


def test_who_ends_while_its_prefix_is_loaded_has_cost_nothing() -> None:
    sched = scheduler(num_pages=10, host_pages=40, max_model_len=40, page_copy_seconds=0.0)
    step = 0
    for id in range(4):
        sched.add(sequence(id, [id * 20 + i for i in range(20)], 2), 0.0)
        while planned := sched.plan(step, 0.0):
            num_rows = len(rows(planned.message))
            answer(sched, step, num_rows, 0.0, copied=bool(planned.message.copies))
            step += 1
    [account] = sched._admission.waiting.queue.shares._accounts.values()
    before, again = account.served, sequence(9, list(range(20)), 2)
    sched.add(again, 0.0)
    sched.plan(step, 0.0)
    assert again.state is SeqState.LOADING
    sched.finish(again, 0.0)
    assert again.place.charged == 0.0
    assert account.served == before


def test_time_in_the_queue_counts_also_when_it_is_followed_by_sharing() -> None:
    sched = scheduler(max_num_seqs=2)
    for id in (1, 2):
        sched.add(sequence(id, 4, 1), 0.0)
    assert sched.plan(0, 0.0) is not None
    first, second = (sequence(id, list(range(8)), 1) for id in (3, 4))
    for seq in (first, second):
        sched.add(seq, 0.0)
    assert sched.plan(1, 0.0) is None  # no slot
    answer(sched, 0, 2, 10.0, copied=False)
    for step in (1, 2):
        assert sched.plan(step, 10.0) is not None
        answer(sched, step, 1, 10.0, copied=False)
    assert "shares" in [event.kind for event in second.timeline.events]
    assert first.timeline.waited["slots"] == 10.0
    assert second.timeline.waited["slots"] == 10.0
