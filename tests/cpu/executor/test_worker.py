"""The executor thread's loop, over a runner whose steps land when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from queue import Empty
from typing import Any

import msgspec
import pytest
import torch

from asyncllm.executor import worker as worker_module
from asyncllm.executor.device import CpuDevice
from asyncllm.executor.leader import Leader
from asyncllm.executor.step.capture import end_capture
from asyncllm.executor.worker import Worker
from asyncllm.wire.channel import FLUSH
from asyncllm.wire.heartbeat import Heartbeat, OperationName
from asyncllm.wire.messages import Admit, RowParams, StepPlan, StepResult, encode, pack
from tests.support.engine.scheduling import limits


class Step:
    """A ticket: done once the runner has been told that it landed."""

    def __init__(self, plan: StepPlan, runner: LaggingRunner):
        self.step = plan.step
        self.num_rows = len(plan.rows) // 12
        self.t_launch = 0.0
        self._runner = runner

    def done(self) -> bool:
        return self.step in self._runner.landed

    def wait(self) -> None:
        self._runner.landed.add(self.step)


class LaggingRunner:
    """Notes what is launched and collected, in order; ``fail`` names steps that cannot launch."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.plans: list[StepPlan] = []
        self.landed: set[int] = set()
        self.fail: set[int] = set()

    def launch(self, plan: StepPlan) -> Step:
        if plan.step in self.fail:
            raise RuntimeError("planted")
        self.log.append(f"launch {plan.step}")
        self.plans.append(plan)
        return Step(plan, self)

    def collect(self, step: Step) -> StepResult:
        self.log.append(f"collect {step.step}")
        return StepResult(step.step, b"", (), None, 0.0, 0.0)


class ScriptedChannel:
    """Hands out messages.

    An int instead of one says that this step has landed on the device; None, that none comes for
    the time that the worker waits.
    """

    def __init__(self, runner: LaggingRunner, script: Sequence[bytes | int | None]):
        self._runner = runner
        self._script = deque(script)
        self.posted: list[StepResult] = []
        self.heartbeat = Heartbeat()

    def receive(self, timeout: float | None = None) -> bytes | None:
        while self._script:
            message = self._script.popleft()
            if isinstance(message, bytes):
                return message
            if message is not None:
                self._runner.landed.add(message)
            elif timeout is not None:
                raise Empty
        return None

    def launched(self) -> None:
        pass

    def post(self, result: StepResult) -> None:
        self.posted.append(result)


def plan(step: int) -> bytes:
    return encode(StepPlan(step, b"", b"", ()))


def rows(step: int) -> bytes:
    return encode(StepPlan(step, pack([0, step, 1]), b"", ()))


def serve(
    script: Sequence[bytes | int | None],
    depth: int = 2,
    fail: set[int] | None = None,
    device: Any = None,
) -> tuple[list[str], list[StepResult]]:
    runner: Any = LaggingRunner()
    runner.fail = fail or set()
    channel: Any = ScriptedChannel(runner, script)
    Worker(runner, limits(steps_in_flight=depth), device or CpuDevice()).run(channel)
    return runner.log, channel.posted


def test_a_step_is_collected_only_once_another_is_queued_behind_it() -> None:
    log, posted = serve([plan(0), plan(1), plan(2)])
    assert log == [
        "launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2",
    ]  # fmt: skip
    assert [result.step for result in posted] == [0, 1, 2]


def test_a_flush_collects_what_is_in_flight() -> None:
    log, _ = serve([plan(0), FLUSH, plan(1)])
    assert log == ["launch 0", "collect 0", "launch 1", "collect 1"]


def test_a_step_that_has_landed_is_posted_before_the_next_launch() -> None:
    log, _ = serve([plan(0), 0, plan(1)])
    assert log == ["launch 0", "collect 0", "launch 1", "collect 1"]


def test_without_overlap_each_step_is_collected_at_once() -> None:
    log, _ = serve([plan(0), plan(1)], depth=1)
    assert log == ["launch 0", "collect 0", "launch 1", "collect 1"]


def capturing(
    script: Sequence[bytes | int | None], count: int, busy: float, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The log of a worker that has ``count`` graphs left to capture."""
    monkeypatch.setattr(worker_module, "BUSY_SECONDS", busy)
    runner: Any = LaggingRunner()
    left = iter(range(count - 1, -1, -1))

    def capture_next() -> bool:
        runner.log.append("capture")
        return next(left) > 0

    channel: Any = ScriptedChannel(runner, script)
    Leader(Worker(runner, limits(steps_in_flight=2), CpuDevice(), capture_next)).run(channel)
    log: list[str] = runner.log
    return log


def test_graphs_are_captured_while_no_plan_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [None, None, plan(0), None, FLUSH, None, None, plan(1)]
    assert capturing(script, 3, 60.0, monkeypatch) == [
        "capture", "capture", "launch 0", "collect 0", "capture", "launch 1", "collect 1",
    ]  # fmt: skip


def test_graphs_are_captured_behind_a_launched_step_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert capturing([plan(0), plan(1), plan(2)], 2, 0.0, monkeypatch) == [
        "launch 0", "capture", "launch 1", "collect 0", "capture", "launch 2", "collect 1",
        "collect 2",
    ]  # fmt: skip
    assert "capture" not in capturing([plan(0), plan(1)], 2, 60.0, monkeypatch)


def test_a_step_that_cannot_be_launched_has_its_result_in_turn() -> None:
    log, posted = serve([plan(0), plan(1), plan(2)], fail={1})
    assert [result.step for result in posted] == [0, 1, 2]
    assert [result.error for result in posted] == [None, "RuntimeError('planted')", None]
    assert log == ["launch 0", "collect 0", "launch 2", "collect 2"]


def test_the_heartbeat_says_what_the_worker_does() -> None:
    runner: Any = LaggingRunner()
    channel: Any = ScriptedChannel(runner, [plan(0), FLUSH, rows(1), rows(2), FLUSH])
    entered: list[tuple[str, int]] = []

    class Noted(Heartbeat):
        def enter(self, name: OperationName, step: int = -1) -> None:
            entered.append((name, step))

    channel.heartbeat = Noted()
    Worker(runner, limits(steps_in_flight=2), CpuDevice()).run(channel)
    assert entered == [
        ("idle", -1), ("launch", 0), ("next plan", -1), ("copy", 0), ("collect", 0),
        ("idle", -1), ("launch", 1), ("next plan", -1), ("launch", 2), ("wait", 1), ("collect", 1),
        ("next plan", -1), ("wait", 2), ("collect", 2), ("idle", -1),
    ]  # fmt: skip


def test_a_plan_that_cannot_be_decoded_has_an_error_for_a_result_and_keeps_its_pages() -> None:
    """Its page table entries and copies are made all the same: later steps rely on them."""
    bad: Any = "hot"
    params = RowParams(temperature=bad)
    admit = Admit(0, pack([1, 2]), 2, params)
    plan_of = StepPlan(1, pack([0, 0, 2]), pack([0, 0, 5]), (admit,), pack([0, 1, 2]))
    broken = encode(
        msgspec.structs.replace(plan_of, state_copies=pack([3, 4]), state_slots=pack([1]))
    )
    runner: Any = LaggingRunner()
    channel: Any = ScriptedChannel(runner, [plan(0), broken, plan(2)])
    Worker(runner, limits(steps_in_flight=2), CpuDevice()).run(channel)
    assert [result.step for result in channel.posted] == [0, 1, 2]
    assert [result.error is None for result in channel.posted] == [True, False, True]
    kept = runner.plans[1]
    assert (kept.step, kept.rows, kept.new_pages, kept.admits, kept.copies) == (
        1,
        b"",
        pack([0, 0, 5]),
        (),
        pack([0, 1, 2]),
    )
    assert (kept.state_copies, kept.state_slots) == (pack([3, 4]), b"")


def test_a_lost_device_ends_the_worker() -> None:
    class LostDevice(CpuDevice):
        def check(self) -> None:
            raise RuntimeError("the device is lost")

        def release(self) -> None:
            raise RuntimeError("the device is lost, again")

    with pytest.raises(RuntimeError, match=r"lost$"):
        serve([plan(0)], fail={0}, device=LostDevice())


POOL = (0, 1)
PLACE = torch.device("cuda", 1)


class Graph:
    """A graph whose capture ends with an error, or without."""

    def __init__(self, error: Exception | None = None):
        self._error = error

    def capture_end(self) -> None:
        if self._error is not None:
            raise self._error


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the allocator is told."""
    calls: list[tuple[Any, ...]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: calls.append((name, *args)))
    return calls


def test_a_capture_that_ends_well_needs_nothing_else(told: list[tuple[Any, ...]]) -> None:
    end_capture(Graph(), POOL, PLACE)  # type: ignore[arg-type]
    assert told == []


def test_the_allocator_leaves_the_pool_of_an_invalid_capture(told: list[tuple[Any, ...]]) -> None:
    with pytest.raises(RuntimeError, match="invalidated"):
        end_capture(Graph(RuntimeError("invalidated")), POOL, PLACE)  # type: ignore[arg-type]
    assert told == [("_cuda_endAllocateToPool", 1, POOL), ("_cuda_releasePool", 1, POOL)]


def test_a_pool_that_was_left_is_not_released_twice(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a graph was captured, and cannot be instantiated."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("not currently recording")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    with pytest.raises(RuntimeError, match="no memory"):
        end_capture(Graph(RuntimeError("no memory")), POOL, PLACE)  # type: ignore[arg-type]
    assert told == []
