"""The order of service: by what is left to prefill, what was begun first, a share for the short."""

from __future__ import annotations

import random
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.policy import Aged, Policy
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.step import Planned
from asyncllm.engine.scheduling.waiting.account import BLOCK, Entry, SortedWork
from asyncllm.wire.messages import StepResult, pack
from tests.support.engine.scheduling import expect_outputs, rows, scheduler, sequence


class Driver:
    """Runs a scheduler step by step; every token is 3."""

    def __init__(self, sched: Scheduler):
        self.sched = sched
        self.numbers = count()
        self.admitted: list[int] = []

    def step(self) -> Planned | None:
        planned = self.sched.plan(number := next(self.numbers), now=0.0)
        if planned is not None:
            self.admitted += [seq.id for seq in planned.admitted]
            tokens = pack([3] * len(rows(planned.message)))
            result = StepResult(number, tokens, (), None, 0.0, 0.0, (), 0.01)
            self.sched.apply(result, 0.0)
        return planned

    def run(self, most: int = 500) -> None:
        for _ in range(most):
            if self.step() is None:
                return
        raise AssertionError("it does not end")


# -- what is cached --------------------------------------------------------------------------------


def test_a_long_prompt_that_is_cached_goes_before_a_short_one_that_is_not() -> None:
    driver = Driver(scheduler(Aged(), max_num_seqs=1))
    history = [id % 90 for id in range(48)]
    driver.sched.add(sequence(1, history, max_tokens=1), 0.0)
    driver.run()
    turn, fresh = sequence(2, [*history, 95, 96], max_tokens=1), sequence(3, 20, max_tokens=1)
    for seq in (fresh, turn):
        driver.sched.add(seq, 0.0)
    assert (turn.service.num_left, fresh.service.num_left) == (2, 20)
    driver.run()
    assert driver.admitted == [1, 2, 3]


def test_a_rank_is_refreshed_when_its_turn_comes() -> None:
    """What was cached when it joined the queue may have been evicted since."""
    driver = Driver(scheduler(Aged(), max_num_seqs=1, num_pages=16))
    history = [id % 90 for id in range(40)]
    driver.sched.add(sequence(1, history, max_tokens=1), 0.0)
    driver.run()
    for id, prompt in ((2, 60), (3, [*history, 95]), (4, 30)):
        driver.sched.add(sequence(id, prompt, max_tokens=1, priority=-(id == 2)), 0.0)
    driver.run()
    assert driver.admitted == [1, 2, 4, 3], "2 took the pages of 3's history"


def test_the_queue_counts_what_is_left() -> None:
    driver = Driver(scheduler(Policy(), max_num_seqs=1))
    history = [id % 90 for id in range(40)]
    driver.sched.add(sequence(1, history, max_tokens=1), 0.0)
    driver.run()
    driver.sched.add(sequence(2, [*history, 95], max_tokens=1), 0.0)
    queue = driver.sched._admission.waiting.queue
    assert (queue.num_tokens, queue.num_left) == (41, 1)
    driver.run()
    assert (queue.num_tokens, queue.num_left) == (0, 0)


# -- what was begun --------------------------------------------------------------------------------


def test_who_was_preempted_resumes_before_anybody_younger_is_admitted() -> None:
    sched = scheduler(Aged(), max_num_seqs=4, num_pages=16, max_model_len=60)
    expect_outputs(sched, 0.0)  # so that too many are admitted
    driver, preempted = Driver(sched), set[int]()
    for id in (1, 2, 3):
        sched.add(sequence(id, 8, max_tokens=40), 0.0)
    for id in range(10, 200):
        sched.add(sequence(id, 4, max_tokens=2), 0.0)
        before = len(driver.admitted)
        driver.step()
        admitted = driver.admitted[before:]
        young = [place for place, seq_id in enumerate(admitted) if seq_id >= 10]
        if young:
            assert preempted <= set(admitted[: young[0]])
        preempted = {seq.id for seq in sched._admission.waiting.queue if seq.num_cached >= 0}
    assert sched.departures.num_preemptions > 0


# -- the share for short prompts -------------------------------------------------------------------


def wall(policy: Policy) -> tuple[int, int]:
    """Steps until a short prompt behind a wall of long ones is served, and until all are."""
    sched = scheduler(policy, max_num_seqs=40, num_pages=2000, max_model_len=400)
    driver = Driver(sched)
    for id in range(20):
        sched.add(sequence(id, 300, max_tokens=1), 0.0)
    driver.step()
    short = sequence(99, 6, max_tokens=1, arrival=100.0)
    sched.add(short, 0.0)
    served = 0
    while sched.batch.running or sched.backlog.num_waiting:
        driver.step()
        served += len(short.tokens) == 6
    return served, next(driver.numbers)


def test_a_wall_of_long_prompts_does_not_hold_up_a_short_one() -> None:
    waited, whole = wall(Aged())
    in_order, least = wall(Policy())
    assert waited <= 3
    assert in_order > 100
    assert whole <= 1.2 * least


def test_the_share_leaves_the_long_ones_their_part() -> None:
    sched = scheduler(Aged(), max_num_seqs=200, num_pages=4000, max_model_len=400)
    driver = Driver(sched)
    long = sequence(0, 300, max_tokens=1)
    sched.add(long, 0.0)
    driver.step()
    for id in range(1, 400):  # as many short ones as anybody wants
        sched.add(sequence(id, 30, max_tokens=1, arrival=100.0), 0.0)
    steps = 0
    while long.state.name != "FINISHED":
        driver.step()
        steps += 1
    assert steps <= 300 / (0.85 * 32) + 2


# -- sums of work ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.booleans()), max_size=60))
def test_sorted_work_is_a_sorted_list(changes: list[tuple[int, int, bool]]) -> None:
    work, model = SortedWork(), list[Entry]()
    for number, (turn, rank, leaves) in enumerate(changes):
        if leaves and model:
            work.remove(model.pop(rank % len(model)))
        else:
            entry = Entry((turn, float(rank)), number, number % 7)
            model.append(entry)
            work.add(entry)
        model.sort()
        assert work.first() == (model[0] if model else None)
        point = Entry((turn, float(rank)), 30, 0)
        ahead = [entry for entry in model if entry < point]
        assert work.before(point) == (len(ahead), sum(entry.work for entry in ahead))


def test_sums_of_a_hundred_thousand_look_at_few_entries() -> None:
    work, rng = SortedWork(), random.Random(0)
    for number in range(100_000):
        work.add(Entry((1, rng.random()), number, 1))
    assert max(map(len, work._blocks)) <= 2 * BLOCK
    assert len(work._blocks) <= 100_000 / BLOCK + 1
    for _ in range(100):
        rank = rng.random()
        ahead, tokens = work.before(Entry((1, rank), 0, 0))
        assert ahead == tokens
        assert abs(ahead - 100_000 * rank) < 2_000


# -- what an attack found --------------------------------------------------------------------------


def test_a_prompt_that_needs_all_pages_is_not_starved_by_the_share() -> None:
    sched = scheduler(max_num_seqs=20, num_pages=100, max_model_len=400)
    expect_outputs(sched, 16.0)
    driver = Driver(sched)
    for id in (1000, 1001):
        sched.add(sequence(id, 4, max_tokens=16), 0.0)
    driver.step()
    large = sequence(1, 360, max_tokens=8)
    sched.add(large, 0.0)
    for id in range(2, 200):
        if sched.backlog.num_waiting < 3:
            sched.add(sequence(id, 4, max_tokens=16, arrival=100.0), 0.0)
        driver.step()
    assert large.num_cached == 0, "it has entered"


def test_many_who_will_be_late_do_not_stop_an_idle_machine() -> None:
    sched = scheduler(max_num_seqs=8)
    sched._forecast.saw_step(1.0, num_rows=1, prompt_tokens=0)
    sched._forecast.saw_output(sequence(1, 4, deadline_ms=8000.0), 50)
    for id in range(2, 302):
        sched.add(sequence(id, 4, max_tokens=8, deadline_ms=8200.0), 0.0)
    assert sched.plan(0, 0.0) is not None


def test_who_has_missed_a_deadline_stops_no_other_account() -> None:
    sched = scheduler()
    for id in range(1, 20):
        sched.add(sequence(id, 4, tenant=f"key {id}", deadline_ms=1000.0), 0.0)
    good = sequence(50, 4, tenant="good")
    sched.add(good, 0.0)
    planned = sched.plan(0, now=5.0)
    assert planned is not None
    assert planned.admitted == [good]
    missed = sched.missed_deadlines()
    assert [seq.id for seq in missed] == list(range(1, 20))
    for seq in missed:
        sched.finish(seq, 5.0)
    assert sched.backlog.num_waiting == 0


def test_questions_change_no_plan() -> None:
    def admitted(*, ask: bool) -> list[int]:
        sched = scheduler(max_num_seqs=4, prefix_caching=False)
        first = sequence(1, 4, tenant="a")
        sched.add(first, 0.0)
        sched.finish(first, 0.0)
        if ask:
            sched.backlog.expected_wait()
        for id, tenant in ((2, "b"), (3, "a")):
            sched.add(sequence(id, 4, tenant=tenant), 0.0)
        planned = sched.plan(0, 0.0)
        assert planned is not None
        return [seq.id for seq in planned.admitted]

    assert admitted(ask=True) == admitted(ask=False)
