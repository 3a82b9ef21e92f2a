"""How long outputs are expected to become."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.engine.policy import Aged
from asyncllm.engine.scheduling.forecast import (
    FIRST_GUESS,
    NUM_BINS,
    Forecast,
    OutputLengths,
    _first_of,
    bin_of,
)
from asyncllm.engine.scheduling.sequence import Sequence, Turn
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from asyncllm.engine.scheduling.waiting.deadlines import given_up
from asyncllm.models.spec import read_spec
from tests.support.engine.scheduling import scheduler, sequence
from tools.bench_policies.__main__ import OVERLOAD, Bench
from tools.bench_policies.hostile import DEADLINES, deadlines
from tools.bench_policies.load import serve

CONTEXT = 32_000


def pass_bins(lengths: OutputLengths, num_tokens: int) -> None:
    for index in range(bin_of(num_tokens)):
        lengths.passed(index)


def end(lengths: OutputLengths, num_tokens: int) -> None:
    pass_bins(lengths, num_tokens)
    lengths.ended(bin_of(num_tokens))


def test_bins_follow_each_other() -> None:
    for index in range(NUM_BINS):
        first, after = _first_of(index), _first_of(index + 1)
        assert bin_of(first) == bin_of(after - 1) == index
        assert after - first <= max(16, first / 4)


def test_before_any_output_has_ended_they_are_expected_to_be_long() -> None:
    lengths = OutputLengths()
    assert lengths.expected(0, 500) == 500
    assert FIRST_GUESS < lengths.expected(0, 2 * FIRST_GUESS) < 2 * FIRST_GUESS


def test_where_none_is_assumed_to_end_before_its_limit() -> None:
    lengths = OutputLengths(first_guess=math.inf, prior_weight=8.0)
    assert lengths.expected(0, 500) == 500
    pass_bins(lengths, 20_000)  # and reached its limit there
    assert lengths.expected(70, CONTEXT) == CONTEXT
    end(lengths, 30)
    assert lengths.expected(0, CONTEXT) > 0.8 * CONTEXT
    for _ in range(60):
        end(lengths, 30)
    assert lengths.expected(0, CONTEXT) < 0.2 * CONTEXT
    assert round(lengths.expected(70, CONTEXT)) == CONTEXT


def test_a_few_outputs_teach_how_long_they_are() -> None:
    lengths = OutputLengths()
    for _ in range(4):
        end(lengths, 60)
    assert 60 <= lengths.expected(0, 2000) < 200
    for _ in range(200):
        end(lengths, 60)
    assert 50 < lengths.expected(0, 2000) < 70


def test_an_output_that_is_long_already_is_like_other_long_ones() -> None:
    lengths = OutputLengths()
    for number in range(1000):
        end(lengths, 50 if number % 5 else 2000)
    assert 300 < lengths.expected(0, CONTEXT) < 700
    assert 1700 < lengths.expected(100, CONTEXT) < 2300
    assert 1700 < lengths.expected(1700, CONTEXT) < 2300


def test_outputs_under_way_are_noticed_before_they_end() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        end(lengths, 60)
    for _ in range(100):
        pass_bins(lengths, 500)
    assert lengths.expected(0, CONTEXT) > 400


@given(
    st.lists(st.tuples(st.integers(0, CONTEXT), st.booleans()), max_size=50),
    st.integers(0, CONTEXT),
    st.integers(1, CONTEXT),
)
def test_an_expectation_is_between_what_there_is_and_what_there_may_be(
    seen: list[tuple[int, bool]], num_tokens: int, most: int
) -> None:
    lengths = OutputLengths()
    for length, ended in seen:
        (end if ended else pass_bins)(lengths, length)
    found = lengths.expected(num_tokens, most)
    assert min(num_tokens, most) <= found <= most * (1 + 1e-9)
    assert found == most or found >= lengths.expected(num_tokens, max(1, most // 2)) * (1 - 1e-9)


def forecast() -> Forecast:
    """100 prompt tokens take a second, and no output takes any time."""
    found = Forecast(StepTimeModel())
    found.saw_step(1.0, num_rows=0, prompt_tokens=100)
    return found


def timely(id: int, num_prompt: int, seconds: float) -> Sequence:
    return sequence(id, num_prompt, deadline_ms=1000 * seconds)


def test_if_all_can_be_in_time_none_is_given_up() -> None:
    seqs = [timely(1, 100, 1.1), timely(2, 300, 4.1), timely(3, 100, 5.1)]
    assert given_up(seqs, 0.0, forecast(), 1.0) == set()
    assert given_up(seqs, 0.0, forecast(), 2.0), "another account has its share"


def test_the_longest_makes_way_for_several_others() -> None:
    seqs = [timely(1, 400, 4.5), timely(2, 100, 4.6), timely(3, 100, 4.7), timely(4, 100, 4.8)]
    assert given_up(seqs, 0.0, forecast(), 1.0) == {1}
    assert given_up(seqs, 3.0, forecast(), 1.0) >= {1}


def test_the_longest_is_late_although_it_is_due_first() -> None:
    sched = scheduler(Aged(), max_num_seqs=1)
    sched._forecast.saw_step(1.0, num_rows=0, prompt_tokens=10)
    long, *short = (timely(id, 50 if id == 1 else 10, 5.5 + id / 10) for id in (1, 2, 3, 4))
    for seq in (long, *short):
        sched.add(seq, 0.0)
    planned = sched.plan(0, 0.0)
    assert planned is not None
    assert planned.admitted == short[:1]
    assert long.place.turn is Turn.LATE


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_class_of_deadlines_is_met_nearly_as_often_as_by_one_who_knows_all_lengths() -> None:
    """Of 6,000 requests, 83.7 % of the class of 5 s were met when none was given up in advance."""
    config = EngineConfig(device="sim", sim_profile="h200-8b")
    bench = Bench(config, read_spec(demo.path()), [])
    load = deadlines(OVERLOAD * bench.capacity(deadlines(1.0).load)).load
    figures = serve(load, bench.limits, bench._cost, Aged())
    bound = bench._edf(load)
    for name in DEADLINES:
        met = np.mean([record.met for record in figures.of_group(name).records])
        assert met > 0.9 * (bound[f"EDF bound, {name}"]["met"] or 1.0)
    dropped = [record for record in figures.records if record.outcome == "dropped"]
    wasted = sum(record.num_prefilled for record in dropped)
    assert wasted < 0.01 * figures.prompt_tokens
