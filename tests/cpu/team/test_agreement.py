"""What ranks do together: numbers they agree on, steps that fail, page copies, graphs."""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import pytest
import torch

from asyncllm.executor.device import CpuDevice
from asyncllm.executor.team.reports import Done
from asyncllm.executor.team.team import TeamChannel
from asyncllm.executor.worker import Worker
from asyncllm.parallel import group
from asyncllm.parallel.collectives import GroupCollectives
from asyncllm.parallel.ranks import Ranks, RanksBroken
from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import StepPlan, StepResult, encode
from tests.support.engine.scheduling import limits
from tests.support.parallel.threads import run_ranks


class Channel:
    """Hands out plans without rows, and keeps the results."""

    def __init__(self, count: int):
        self.heartbeat = Heartbeat()
        self.results: list[StepResult] = []
        self._plans = deque(encode(StepPlan(step, b"", b"", ())) for step in range(count))

    def receive(self, timeout: float | None = None) -> bytes | None:
        return self._plans.popleft() if self._plans else None

    def launched(self) -> None:
        pass

    def post(self, result: StepResult) -> None:
        self.results.append(result)


class Runner:
    """Adds up a number over the ranks in each step; fails in step 1 before or after that."""

    def __init__(self, ranks: Ranks, fails: str):
        self._ranks = ranks
        self._fails = fails

    def launch(self, plan: StepPlan) -> StepResult:
        if plan.step == 1 and self._fails == "before":
            raise RuntimeError("planted")
        total = self._ranks.sum(torch.ones(1))
        if plan.step == 1 and self._fails == "after":
            raise RuntimeError("planted")
        return StepResult(plan.step, b"", (), None, 0.0, 0.0, seconds=float(total))


def serve(ranks: Ranks, fails: str) -> list[StepResult] | str:
    """The results of three steps on one rank, or why it ended."""
    runner: Any = Runner(ranks, fails)
    channel = Channel(3)
    worker = Worker(runner, limits(steps_in_flight=2), CpuDevice(), ranks=ranks)
    try:
        worker.run(channel)
    except RanksBroken as error:
        return str(error)
    return channel.results


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_step_that_fails_on_all_ranks_fails_alone(fails: str) -> None:
    for results in run_ranks(3, lambda ranks: serve(ranks, fails)):
        assert not isinstance(results, str)
        assert [result.error is None for result in results] == [True, False, True]
        assert results[2].seconds == 3.0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_step_that_fails_on_one_rank_ends_the_ranks(
    fails: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_AGREE_SECONDS", timedelta(seconds=0.5))
    monkeypatch.setattr(group, "_STEP", timedelta(seconds=2))
    work = {rank: fails, 1 - rank: "never"}
    ends = run_ranks(2, lambda ranks: serve(ranks, work[ranks.rank]))
    assert ends[rank] == f"step 1 failed on rank {rank} alone"
    assert isinstance(ends[1 - rank], str)
    assert "lost the others" in ends[1 - rank]


def test_abort_does_not_wait_for_nccl_and_close_does() -> None:
    """NCCL waits for the end of the graphs that it is in, which may be the caller's."""
    graphs_end = threading.Event()
    ended: list[str] = []

    def end() -> None:
        graphs_end.wait()
        time.sleep(0.1)
        ended.append("once")

    collectives = GroupCollectives(2, None, end)
    collectives.abort()
    collectives.abort()
    assert ended == []
    graphs_end.set()
    collectives.close()
    collectives.close()
    assert ended == ["once"]


def test_a_step_that_fails_elsewhere_on_another_rank_ends_the_ranks() -> None:
    def fail(ranks: Any) -> str:
        ranks.calls = ranks.rank
        with pytest.raises(RanksBroken) as broken:
            ranks.agree(7)
        return str(broken.value)

    words = "step 7 failed on rank {} elsewhere than on others"
    assert run_ranks(2, fail) == [words.format(0), words.format(1)]


def test_all_ranks_have_the_least_number_and_rank_zeros_tensor() -> None:
    def both(ranks: Ranks) -> tuple[int, list[int]]:
        tensor = torch.full((3,), ranks.rank + 7, dtype=torch.int32)
        ranks.broadcast(tensor)
        return ranks.least(10 - ranks.rank), tensor.tolist()

    assert run_ranks(3, both) == [(8, [7, 7, 7])] * 3


def test_columns_are_gathered_in_the_order_of_ranks() -> None:
    def gathered(ranks: Ranks) -> list[list[int]]:
        columns = torch.tensor([[0, 1], [2, 3]]) + 10 * ranks.rank
        rows: list[list[int]] = ranks.gather(columns).tolist()
        return rows

    assert run_ranks(2, gathered) == [[[0, 1, 10, 11], [2, 3, 12, 13]]] * 2


class FakeTeam:
    """Peers whose reports the test has written."""

    def __init__(self, reports: list[list[Done]]):
        self._reports = deque(reports)

    def done(self, step: int) -> list[Done]:
        return self._reports.popleft()


def test_a_page_copy_is_done_when_all_ranks_have_done_it() -> None:
    reports = [
        [Done(0, False, ()), Done(0, False, ((0, 0.5),))],
        [Done(1, False, ((0, 0.25),)), Done(1, False, ())],
        [Done(2, False, ((1, 1.0),)), Done(2, False, ((1, 2.0),))],
    ]
    channel, team = Channel(0), FakeTeam(reports)
    shared = TeamChannel(channel, team)  # type: ignore[arg-type]
    for step, copied in enumerate([((0, 0.125),), (), ((1, 0.5),)]):
        shared.post(StepResult(step, b"", (), None, 0.0, 0.0, copied=copied))
    assert [result.copied for result in channel.results] == [(), ((0, 0.5),), ((1, 2.0),)]
