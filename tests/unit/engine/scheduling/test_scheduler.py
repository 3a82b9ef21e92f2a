"""What the scheduler decides, in cases small enough to check by hand."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest

from asyncllm.engine.policy import Aged, LongestFirst, Policy
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import SeqState, Turn
from asyncllm.engine.scheduling.step import MOST_PAGES, NEWCOMER_PAGES, Applied
from asyncllm.types import FinishReason, SamplingParams
from asyncllm.wire.messages import BAD_TOKEN, NO_TOKEN, StepPlan, StepResult, pack, unpack
from tests.support.engine.scheduling import (
    EOS,
    FakeDevice,
    expect_outputs,
    rows,
    scheduler,
    sequence,
)


def plan(sched: Scheduler, step: int = 0) -> StepPlan:
    planned = sched.plan(step, now=float(step))
    assert planned is not None
    return planned.message


def apply(
    sched: Scheduler, *tokens: int, error: str | None = None, unmet: tuple[int, ...] = ()
) -> Applied:
    data = b"" if error else pack(tokens)
    failures = tuple((row, "no token is allowed") for row in unmet)
    result = StepResult(0, data, (), error, 0.0, 0.0, (), 0.01, failures=failures)
    return sched.apply(result, now=0.0)


def run(sched: Scheduler, steps: int = 100) -> list[int]:
    """Step by step until nothing runs; the ids of those that finish, in order."""
    finished: list[int] = []
    for step in range(steps):
        planned = sched.plan(step, now=float(step))
        if planned is None:
            return finished
        emitted = apply(sched, *[3] * len(rows(planned.message))).emitted
        finished += [e.seq.id for e in emitted if e.finish]
    raise AssertionError("it does not end")


def test_decode_rows_come_first_and_prompts_share_what_is_left() -> None:
    sched = scheduler(max_num_batched_tokens=20, max_num_seqs=4)
    sched.add(sequence(1, 6), 0.0)
    assert rows(plan(sched, 0)) == [(0, 0, 6)]
    sched.add(sequence(2, 12), 0.0)
    sched.add(sequence(3, 12), 0.0)
    assert rows(plan(sched, 1)) == [(0, 6, 1), (1, 0, 12), (2, 0, 7)]
    assert rows(plan(sched, 2)) == [(0, 7, 1), (1, 12, 1), (2, 7, 5)]


def test_rows_of_a_model_with_recurrent_layers_name_the_slots_of_their_states() -> None:
    sched = scheduler(max_num_seqs=4, num_states=4)
    for id in (1, 2, 3):
        sched.add(sequence(id, 6), 0.0)
    for step in range(2):
        assert unpack(plan(sched, step).state_slots).tolist() == [1, 2, 3]
    without = scheduler()
    without.add(sequence(1, 6), 0.0)
    assert plan(without).state_slots == b""


def test_several_long_prompts_are_prefilled_side_by_side() -> None:
    sched = scheduler(max_num_batched_tokens=12, prefill_chunk=4)
    for id in (1, 2, 3):
        sched.add(sequence(id, 20), 0.0)
    assert rows(plan(sched, 0)) == [(0, 0, 4), (1, 0, 4), (2, 0, 4)]
    assert rows(plan(sched, 1)) == [(0, 4, 4), (1, 4, 4), (2, 4, 4)]


def test_the_last_chunk_of_a_step_leaves_nothing_to_pad() -> None:
    limits: Any = {"max_num_batched_tokens": 50, "prefill_chunk": 50, "step_sizes": (24, 40, 64)}
    sched = scheduler(page_size=4, num_pages=64, **limits)
    sched.add(sequence(1, 95), 0.0)
    assert rows(plan(sched, 0)) == [(0, 0, 40)]
    assert rows(plan(sched, 1)) == [(0, 40, 40)]
    sched.add(sequence(2, 30), 0.0)
    assert rows(plan(sched, 2)) == [(0, 80, 15), (1, 0, 30)]
    sched.add(sequence(3, 25), 0.0)
    sched.add(sequence(4, 60), 0.0)
    # A chunk that ends its prompt stays whole, and less than a few tokens is not worth a row.
    assert rows(plan(sched, 3)) == [(0, 95, 1), (1, 30, 1), (2, 0, 25), (3, 0, 23)]


def test_a_short_prompt_overtakes_a_long_one_in_the_middle() -> None:
    sched = scheduler(max_num_batched_tokens=10)
    sched.add(sequence(1, 40), 0.0)
    assert rows(plan(sched, 0)) == [(0, 0, 10)]
    sched.add(sequence(2, 4), 0.0)
    assert rows(plan(sched, 1)) == [(1, 0, 4), (0, 10, 6)]


def test_a_long_prompt_that_has_waited_overtakes_short_ones_that_arrive_later() -> None:
    sched = scheduler(Aged(), max_num_seqs=1)
    sched.add(sequence(1, 8, max_tokens=1), 0.0)
    plan(sched)
    sched.add(sequence(2, 40, arrival=0.0), 0.0)
    sched.add(sequence(3, 1, arrival=0.001), 0.0)  # within 39 tokens' handicap, 9.75 ms
    sched.add(sequence(4, 1, arrival=0.020), 0.0)  # beyond it
    apply(sched, 3)
    assert run(sched) == [3, 2, 4]


def test_priorities_order_the_queue_and_are_worth_a_bounded_wait() -> None:
    sched = scheduler(Aged(), max_num_seqs=1)
    sched.add(sequence(1, 8, max_tokens=1), 0.0)
    plan(sched)
    sched.add(sequence(2, 4, arrival=0.0, priority=1), 0.0)
    sched.add(sequence(3, 4, arrival=4.9, priority=0), 4.9)
    sched.add(sequence(4, 4, arrival=5.1, priority=0), 5.1)
    sched.add(sequence(5, 4, arrival=5.2, priority=-10), 5.2)
    apply(sched, 3)
    assert run(sched) == [5, 3, 2, 4]


def test_the_nearest_deadline_takes_the_first_of_the_places_that_deadlines_hold() -> None:
    sched = scheduler(Aged(), max_num_seqs=1)
    for id, deadline in ((1, None), (2, 90_000.0), (3, 10_000.0), (4, None)):
        sched.add(sequence(id, 40, deadline_ms=deadline), 0.0)
    assert run(sched) == [1, 3, 2, 4]


def test_who_will_probably_be_late_makes_way_and_who_surely_is_late_does_not_run() -> None:
    sched = scheduler(Aged(), max_num_seqs=1)
    for seconds in (1.0, 1.0):
        sched._forecast.saw_step(seconds, num_rows=1, prompt_tokens=0)
    late = sequence(1, 40, max_tokens=20, deadline_ms=5000.0)
    sched._forecast.saw_output(late, 10)
    doomed = sequence(2, 40, deadline_ms=500.0)
    timely = sequence(3, 40, max_tokens=2, deadline_ms=60_000.0)
    for seq in (late, doomed, timely):
        sched.add(seq, 0.0)
    plan(sched)
    assert list(sched.batch.running) == [3]
    assert sched.missed_deadlines() == [doomed]
    sched.finish(doomed, 1.0)
    assert sched.missed_deadlines() == []
    assert late.place.turn is Turn.LATE


def test_policies_for_order_of_arrival_and_for_batches() -> None:
    for policy, expected in ((Policy(), [1, 2, 3]), (LongestFirst(), [2, 3, 1])):
        sched = scheduler(policy, max_num_seqs=1)
        for id, max_tokens in ((1, 2), (2, 9), (3, 5)):
            sched.add(sequence(id, 10 - id, max_tokens, arrival=float(id)), float(id))
        assert run(sched) == expected


def test_chunks_are_bounded_and_only_the_last_samples() -> None:
    sched = scheduler(prefill_chunk=4)
    sched.add(sequence(1, 10), 0.0)
    assert rows(plan(sched, 0)) == [(0, 0, 4)]
    assert rows(plan(sched, 1)) == [(0, 4, 4)]
    assert rows(plan(sched, 2)) == [(0, 8, 2)]
    assert apply(sched, NO_TOKEN).emitted == []
    assert apply(sched, NO_TOKEN).emitted == []
    [emitted] = apply(sched, 3).emitted
    assert emitted.token == 3


def test_nothing_is_scheduled_past_max_tokens() -> None:
    sched = scheduler()
    sched.add(sequence(1, 3, max_tokens=2), 0.0)
    plan(sched, 0)
    plan(sched, 1)
    assert sched.plan(2, 0.0) is None
    assert apply(sched, 3).emitted[0].finish is None
    assert apply(sched, 3).emitted[0].finish is FinishReason.LENGTH
    assert sched.cache.num_in_use == 0


def test_the_row_after_an_end_of_sequence_is_discarded() -> None:
    sched = scheduler()
    seq = sequence(1, 3, max_tokens=9)
    sched.add(seq, 0.0)
    plan(sched, 0)
    plan(sched, 1)
    assert apply(sched, EOS).emitted[0].finish is FinishReason.STOP
    assert sched.cache.num_in_use > 0, "a step in flight still writes there"
    assert apply(sched, 5).emitted == []
    assert sched.cache.num_in_use == 0
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
    sched.add(sequence(1, 3, max_tokens=5, params=params), 0.0)
    plan(sched)
    assert (apply(sched, EOS).emitted[0].finish is FinishReason.STOP) == ends


# -- prefixes --------------------------------------------------------------------------------------


def test_a_full_hit_still_computes_the_last_token() -> None:
    sched = scheduler()
    prompt = list(range(8))
    sched.add(sequence(1, prompt), 0.0)
    run(sched)
    again = sequence(2, prompt)
    sched.add(again, 0.0)
    assert rows(plan(sched)) == [(0, 4, 4)]
    assert again.num_cached == 4


def test_identical_prompts_arriving_together_compute_the_shared_part_once() -> None:
    sched = scheduler()
    prompt = list(range(20))
    for id in (1, 2, 3):
        sched.add(sequence(id, prompt), 0.0)
    assert rows(plan(sched, 0)) == [(0, 0, 20)]
    assert sched.backlog.num_waiting == 2
    apply(sched, 3)
    assert rows(plan(sched, 1)) == [(0, 20, 1), (1, 16, 4), (2, 16, 4)]


def test_those_who_share_go_on_alone_when_the_first_fails() -> None:
    sched = scheduler()
    for id in (1, 2):
        sched.add(sequence(id, list(range(20))), 0.0)
    plan(sched, 0)
    [emitted] = apply(sched, BAD_TOKEN).emitted
    assert emitted.seq.id == 1
    assert rows(plan(sched, 1)) == [(0, 0, 20)]
    assert sched.batch.running[2].num_cached == 0


def test_what_a_failed_sequence_wrote_is_never_a_hit() -> None:
    sched = scheduler(prefill_chunk=8)
    prompt = list(range(20))
    sched.add(sequence(1, prompt), 0.0)
    for step, token in enumerate((NO_TOKEN, NO_TOKEN, BAD_TOKEN)):
        plan(sched, step)
        apply(sched, token)
    sched.add(sequence(2, prompt), 0.0)
    assert rows(plan(sched, 3)) == [(0, 0, 8)]
    assert sched.cache.num_cached == 0


def test_what_a_sequence_wrote_whose_constraints_failed_is_a_hit() -> None:
    sched = scheduler()
    seq = sequence(1, list(range(20)))
    sched.add(seq, 0.0)
    plan(sched, 0)
    apply(sched, 3)
    plan(sched, 1)
    plan(sched, 2)  # goes on from a token that there will not be
    [emitted] = apply(sched, BAD_TOKEN, unmet=(0,)).emitted
    assert (emitted.token, emitted.finish) == (BAD_TOKEN, None)
    assert not seq.kv.corrupt
    assert apply(sched, BAD_TOKEN, unmet=(0,)).emitted == []
    assert sched.cache.num_in_use == 0
    second = sequence(2, [*range(20), 3, 7])
    sched.add(second, 0.0)
    assert rows(plan(sched, 3)) == [(0, 20, 2)]


def test_constraints_that_fail_at_once_leave_the_prompt_in_the_cache() -> None:
    sched = scheduler()
    sched.add(sequence(1, list(range(20))), 0.0)
    plan(sched, 0)
    apply(sched, BAD_TOKEN, unmet=(0,))
    sched.add(sequence(2, list(range(20))), 0.0)
    assert rows(plan(sched, 1)) == [(0, 16, 4)]


def test_what_is_not_finite_behind_failed_constraints_spoils_all() -> None:
    sched = scheduler()
    sched.add(sequence(1, list(range(20))), 0.0)
    for step in range(3):
        plan(sched, step)
    apply(sched, 3)
    apply(sched, BAD_TOKEN, unmet=(0,))
    apply(sched, BAD_TOKEN)
    assert sched.cache.num_free == sched.cache.num_pages


def test_a_failed_step_leaves_nothing_in_the_cache() -> None:
    sched = scheduler()
    sched.add(sequence(1, 20), 0.0)
    plan(sched)
    assert [seq.id for seq in apply(sched, error="planted").failed] == [1]
    assert sched.cache.num_free == sched.cache.num_pages


def test_another_turn_of_a_chat_finds_the_answer_of_the_turn_before() -> None:
    sched = scheduler()
    first = sequence(1, list(range(6)), max_tokens=8)
    sched.add(first, 0.0)
    run(sched)
    second = sequence(2, [*first.tokens, 40, 41])
    sched.add(second, 0.0)
    plan(sched)
    assert second.num_cached == 12, "of 14 tokens, the last of which was never computed"


def test_salts_isolate() -> None:
    sched = scheduler()
    sched.add(sequence(1, list(range(20)), cache_salt="a"), 0.0)
    run(sched)
    for id, salt, cached in ((2, "b", 0), (3, "", 0), (4, "a", 16), (5, "\ud800", 0)):
        seq = sequence(id, list(range(20)), cache_salt=salt)
        sched.add(seq, 0.0)
        plan(sched)
        sched.finish(seq, 0.0)
        apply(sched, 3)
        assert seq.num_cached == cached


def test_without_prefix_caching_nothing_stays() -> None:
    sched = scheduler(prefix_caching=False)
    for id in (1, 2):
        seq = sequence(id, list(range(20)))
        sched.add(seq, 0.0)
        run(sched)
        assert seq.num_cached == 0
        assert sched.cache.num_free == sched.cache.num_pages


# -- pressure --------------------------------------------------------------------------------------


def test_the_victim_has_the_least_to_do_again_and_resumes_with_its_tokens() -> None:
    sched = expect_outputs(scheduler(num_pages=8, page_size=4, max_model_len=32), 1.0)
    old, long, short = (sequence(id, n, 12) for id, n in ((1, 4), (2, 8), (3, 3)))
    for seq in (old, long, short):
        sched.add(seq, 0.0)
    finished = run(sched)
    assert sorted(finished) == [1, 2, 3]
    assert sched.departures.num_preemptions >= 1
    kinds = [event.kind for event in old.timeline.events]
    assert "preempted" not in kinds, "the oldest is never a victim"
    first = min(
        event.step
        for seq in (long, short)
        for event in seq.timeline.events
        if event.kind == "preempted"
    )
    assert [e.step for e in short.timeline.events if e.kind == "preempted"][:1] == [first]
    assert [len(seq.tokens) for seq in (old, long, short)] == [16, 20, 15]


def test_a_preempted_sequence_is_a_prefix_hit_when_it_comes_back() -> None:
    sched = expect_outputs(scheduler(num_pages=12, page_size=2, max_model_len=24), 1.0)
    old, young = sequence(1, 8, max_tokens=10), sequence(2, 10, max_tokens=6)
    sched.add(old, 0.0)
    sched.add(young, 0.0)
    assert sorted(run(sched)) == [1, 2]
    admitted = [event for event in young.timeline.events if event.kind == "admitted"]
    assert len(admitted) == 2
    assert admitted[1].b > 0, "part of its pages were still there"


def test_admission_expects_outputs_and_does_not_reserve_them() -> None:
    for expected, running in ((2.0, 4), (40.0, 1)):
        sched = expect_outputs(scheduler(num_pages=16, page_size=4, max_model_len=64), expected)
        for id in range(1, 5):
            sched.add(sequence(id, 8, max_tokens=50), 0.0)
        plan(sched)
        assert len(sched.batch.running) == running


def test_certain_lengths_are_taken_at_their_word() -> None:
    sched = expect_outputs(scheduler(num_pages=16, page_size=4, max_model_len=64), 2.0)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    for id in range(1, 5):
        sched.add(sequence(id, 8, max_tokens=50, params=params), 0.0)
    plan(sched)
    assert len(sched.batch.running) == 1


def test_a_request_as_large_as_the_cache_runs_alone_and_blocks_nobody_for_ever() -> None:
    sched = scheduler(num_pages=16, page_size=4, max_model_len=64)
    sched.add(sequence(1, 4, max_tokens=3), 0.0)
    plan(sched)
    sched.add(sequence(2, 60, max_tokens=4), 0.0)
    sched.add(sequence(3, 4, max_tokens=3, arrival=1.0), 0.0)
    apply(sched, 3)
    assert run(sched) == [1, 2, 3]


def test_over_capacity_everything_finishes_and_preemptions_are_bounded() -> None:
    sched = expect_outputs(
        scheduler(num_pages=40, page_size=4, max_model_len=160, max_num_seqs=16), 1.0
    )
    count = 40  # 40 requests of about 10 pages each
    for id in range(1, count + 1):
        sched.add(sequence(id, 8 + id % 20, max_tokens=10 + id % 25), 0.0)
    assert sorted(run(sched, 5000)) == list(range(1, count + 1))
    assert 0 < sched.departures.num_preemptions <= count


# -- the host --------------------------------------------------------------------------------------


def run_with_copies(sched: Scheduler, *, copy_seconds: float, step_seconds: float) -> None:
    """Like ``run``; every copy is done by the end of its step."""
    for step in range(100):
        planned = sched.plan(step, 0.0)
        if planned is None:
            return
        tokens = pack([3] * len(rows(planned.message)))
        copied = ((step, copy_seconds),) if planned.message.copies else ()
        sched.apply(StepResult(step, tokens, (), None, 0.0, 0.0, copied, step_seconds), 0.0)
    raise AssertionError("it does not end")


def test_evicted_pages_come_back_from_the_host() -> None:
    sched = scheduler(num_pages=10, host_pages=40, max_model_len=40, page_copy_seconds=0.0)
    prompts = [[id * 20 + i for i in range(20)] for id in range(4)]
    id = 0
    for round in range(3):
        for prompt in prompts:
            id += 1
            seq = sequence(id, prompt, max_tokens=2)
            sched.add(seq, 0.0)
            run_with_copies(sched, copy_seconds=0.0, step_seconds=0.01)
            assert seq.state is SeqState.FINISHED
            if round:
                assert "loading" in [event.kind for event in seq.timeline.events]
                assert seq.num_cached == 16


def test_nothing_is_loaded_when_computing_is_faster() -> None:
    sched = scheduler(num_pages=10, host_pages=40, max_model_len=40, page_copy_seconds=1.0)
    for round in range(3):
        for id in range(4):
            seq = sequence(10 * round + id, [id * 20 + i for i in range(20)], max_tokens=6)
            sched.add(seq, 0.0)
            run_with_copies(sched, copy_seconds=1.0, step_seconds=0.001)
            if round:
                assert sched.times.fitted
                assert sched.cache.num_host_used > 0
                assert "loading" not in [event.kind for event in seq.timeline.events]


# -- explanations ----------------------------------------------------------------------------------


def test_a_timeline_says_what_the_queue_was_waiting_for() -> None:
    sched = scheduler(max_num_seqs=1)
    first, second = sequence(1, 4, max_tokens=5), sequence(2, 4)
    sched.add(first, 0.0)
    sched.plan(0, 0.0)
    sched.add(second, 0.0)
    for step in range(1, 7):
        sched.plan(step, float(step))
        apply(sched, 3)
        if step == 3:
            assert second.timeline.waited["slots"] == 2.0, "so far"
    assert second.state is SeqState.RUNNING
    assert second.timeline.waited["slots"] >= 4.0
    assert second.timeline.waited["pages"] == 0.0
    assert [event.kind for event in second.timeline.events] == ["queued", "admitted", "chunk"]


def test_a_timeline_of_a_request_that_gave_up_says_what_it_was_waiting_for() -> None:
    sched = scheduler(max_num_seqs=1)
    first, second = sequence(1, 4, max_tokens=50), sequence(2, 4)
    sched.add(first, 0.0)
    sched.plan(0, 0.0)
    sched.add(second, 0.0)
    sched.plan(1, 0.0)
    sched.finish(second, 9.0)
    assert second.timeline.waited == {"slots": 9.0, "pages": 0.0, "budget": 0.0}


def test_every_output_teaches_how_long_outputs_are() -> None:
    """Also of those that end outside, by a stop string."""
    sched = scheduler(num_pages=4000)
    for id in range(200):
        seq = sequence(id, 3, max_tokens=50)
        sched.add(seq, 0.0)
        plan(sched, id)
        apply(sched, 3)
        sched.finish(seq, 0.0)
    waiting = sequence(1000, 3, max_tokens=50)
    assert sched._forecast.length(waiting) < 3 + 16


def test_those_who_share_are_looked_at_once_and_not_for_every_chunk() -> None:
    sched = scheduler(
        max_model_len=2000,
        num_pages=1000,
        max_num_seqs=50,
        prefill_chunk=16,
        max_num_batched_tokens=64,
    )
    matches = []
    match = sched.cache.match
    sched.cache.match = lambda *asked: matches.append(1) or match(*asked)  # type: ignore[method-assign,func-returns-value]
    for id in range(40):
        sched.add(sequence(id, list(range(1000)), arrival=float(id)), 0.0)
    for step in range(2):
        plan(sched, step)
    for step in range(2, 30):
        apply(sched, NO_TOKEN)
        plan(sched, step)
    assert sched.backlog.num_waiting == 39
    assert len(matches) == 2 * 40, "when it joins the queue, and when it is the head"


def test_a_plan_admits_so_many_that_the_event_loop_can_go_on() -> None:
    many: dict[str, Any] = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
        "prefill_chunk": 4096,
    }
    sched = scheduler(**many, num_pages=4000, itl_target=0.0)
    for i in range(256):
        sched.add(sequence(i, 4), 0.0)
    admitted = [len(plan.admitted) for plan in (sched.plan(n, 0.0) for n in range(3)) if plan]
    assert sum(admitted) == 256
    assert max(admitted) <= MOST_PAGES / NEWCOMER_PAGES


def test_who_shares_a_long_prefix_counts_for_its_pages() -> None:
    many: dict[str, Any] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "prefill_chunk": 8192,
    }
    sched = scheduler(**many, page_size=1, num_pages=9000, max_model_len=4096, itl_target=0.0)
    prefix = [1] * 3000
    sched.add(sequence(0, [*prefix, 2]), 0.0)
    first = sched.plan(0, 0.0)
    assert first is not None
    for i in range(1, 64):
        sched.add(sequence(i, [*prefix, 2 + i]), 0.0)
    sched.apply(StepResult(0, pack([5]), (), None, 0.0, 0.0, (), 0.01), 0.0)
    admitted = [len(plan.admitted) for plan in (sched.plan(n, 0.0) for n in range(1, 4)) if plan]
    assert admitted == [4, 4, 4], "3,001 pages each; the one that passes the bound is the last"


def test_without_a_target_prompts_fill_whole_steps() -> None:
    """Whoever decodes meanwhile, and whatever is known of step times."""
    sizes: dict[str, Any] = {
        "max_num_batched_tokens": 2048,
        "prefill_chunk": 2048,
        "max_model_len": 2000,
        "num_pages": 1000,
    }
    for target, tokens in ((0.0, 1500), (0.01, 512)):
        sched = scheduler(itl_target=target, **sizes)
        device = FakeDevice(sched.limits)
        sched.add(sequence(1, 5, 40), 0.0)
        for number in range(3):
            planned = sched.plan(number, 0.0)
            assert planned is not None
            device.take(planned.message, repeat(5))
            sched.apply(device.answer(), 0.0)
        sched.add(sequence(2, 1500, 4), 0.0)
        planned = sched.plan(3, 0.0)
        assert planned is not None
        assert [q_len for _, _, q_len in rows(planned.message)] == [1, tokens]
