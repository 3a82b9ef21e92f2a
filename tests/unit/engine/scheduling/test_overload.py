"""Which deadlines are given up when not all can be met."""

from __future__ import annotations

import numpy as np
import pytest

from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.engine.policy import Aged
from asyncllm.engine.scheduling.forecast import Forecast, given_up
from asyncllm.engine.scheduling.sequence import Sequence, Turn
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from asyncllm.models.spec import read_spec
from tests.support.engine.scheduling import scheduler, sequence
from tools.bench_policies.__main__ import OVERLOAD, Bench
from tools.bench_policies.hostile import DEADLINES, deadlines
from tools.bench_policies.load import serve


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
    assert long.turn is Turn.LATE


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
