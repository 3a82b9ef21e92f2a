"""Calibration: from recorded steps to a profile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.__main__ import main
from asyncllm.engine.recording.trace_file import Arrival, Header, Plan, Result, Trace, TraceWriter
from asyncllm.engine.stats import StepFigures
from asyncllm.errors import BadRequest
from asyncllm.executor.sim import virtual_time
from asyncllm.executor.sim.profile import HostTimes, StepShape, find_profile, load, shipped
from asyncllm.lab.bench.report import OfflineRow, OnlineRow, Report
from asyncllm.lab.replay.calibrate import calibrate
from asyncllm.lab.replay.calibrate_host import begin_seconds, host_times, request_seconds, solve
from asyncllm.lab.replay.steps import RecordedStep, Sample
from tests.support.engine.scheduling import limits

Truth = Callable[[StepShape], float]
GAP = 30e-6


def per_token(shape: StepShape) -> float:
    """Decode rows cost what they read; prompts what they compute."""
    if shape.decode:
        return 2e-3 + 1e-6 * shape.rows + 4e-8 * shape.kv_tokens
    return (
        3e-3
        + 2e-5 * shape.tokens
        + 3e-8 * shape.kv_tokens
        + 1e-9 * float(shape.seen @ shape.chunk_lengths)
    )


def recorded(truth: Truth, count: int = 400) -> list[RecordedStep]:
    """Random steps, one after the other without a break but GAP; the first is alone."""
    rng, steps, now = random.Random(3), [], 10.0
    for i in range(count):
        rows = [(rng.randrange(50, 3000), 1) for _ in range(rng.choice([1, 2, 8, 24, 64]))]
        if i % 2 == 0:
            rows = rows[: rng.randrange(len(rows) + 1)]
            rows.append((rng.choice([0, 512, 4000]), rng.randrange(16, 2000)))
        starts, lengths = np.array(rows, dtype=np.int64).T
        seconds = truth(StepShape.of(starts, lengths, len(rows)))
        wait = 0.002 if i == 0 else GAP
        steps.append(
            RecordedStep(
                starts,
                lengths,
                len(rows),
                decode_steps=1,
                planned=now,
                alone=i == 0,
                before=now,
                reported=now + wait + seconds,
                seconds=seconds,
            )
        )
        now += wait + seconds
    return steps


def test_known_step_times_are_found_again() -> None:
    steps = recorded(per_token)
    profile, errors = calibrate([steps], limits(), "made up")
    assert sum(error.steps for error in errors) == len(steps)
    assert all(error.p90 < 0.02 for error in errors), errors
    for rows in ([(700, 1)], [(1000, 1)] * 40, [(0, 300)], [(700, 1)] * 8 + [(512, 1000)]):
        starts, lengths = np.array(rows, dtype=np.int64).T
        shape = StepShape.of(starts, lengths, len(rows))
        assert profile.steps.seconds(shape) == pytest.approx(per_token(shape), rel=0.03)
    assert profile.host.idle(100) == pytest.approx(0.002, rel=0.01)
    assert {kind.gap for kind in profile.kinds} == {GAP}


def test_padded_steps_have_the_time_of_their_size() -> None:
    sizes = (512, 1024, 2048)

    def padded(shape: StepShape) -> float:
        size = next(size for size in (32, 64, 128, 192, 256, *sizes) if size >= shape.tokens)
        return 2e-3 if shape.decode else 1e-3 + 1e-5 * size

    steps = recorded(padded)
    profile, _ = calibrate([steps], limits(step_sizes=sizes), "made up")
    assert profile.step_sizes == sizes
    for tokens, size in ((513, 1024), (1024, 1024), (1025, 2048)):
        shape = StepShape.of(np.array([0]), np.array([tokens]), 1)
        assert profile.steps.seconds(shape) == pytest.approx(1e-3 + 1e-5 * size, rel=0.01)


def test_steps_beyond_the_largest_size_take_longer_at_once() -> None:
    """Those that are just beyond it, and much larger ones, tell what is between."""

    def truth(shape: StepShape) -> float:
        if shape.decode:
            return 2e-3
        size = next((size for size in (32, 64, 128, 192, 256, 1024) if size >= shape.tokens), None)
        return 1e-3 + 1e-5 * size if size is not None else 6e-3 + 1e-5 * shape.tokens

    def larger(step: RecordedStep, num_tokens: int) -> RecordedStep:
        starts, lengths = np.array([[0, num_tokens]], dtype=np.int64).T
        seconds = truth(StepShape.of(starts, lengths, 1))
        return step._replace(starts=starts, lengths=lengths, num_samples=1, seconds=seconds)

    rng = random.Random(7)
    steps = [step for step in recorded(truth) if step.lengths.sum() <= 1024]
    for low, high in ((1030, 1300), (6000, 8000)):
        steps += [larger(step, rng.randrange(low, high)) for step in steps[:40]]
    profile, _ = calibrate([steps], limits(step_sizes=(1024,)), "made up")
    for tokens in (1024, 1030, 1536, 3000, 8000):
        shape = StepShape.of(np.array([0]), np.array([tokens]), 1)
        assert profile.steps.seconds(shape) == pytest.approx(truth(shape), rel=0.03), tokens


def test_steps_that_differ_are_found_to_differ() -> None:
    rng = random.Random(5)
    steps = [
        step._replace(seconds=step.seconds * rng.choice([0.9, 1.0, 1.1]))
        for step in recorded(per_token, 2000)
    ]
    profile, _ = calibrate([steps], limits(), "made up")
    spread = next(kind for kind in profile.kinds if kind.name == "decode, 1 rows").ratios
    assert spread[0] == pytest.approx(0.9, abs=0.04)
    assert spread[-1] == pytest.approx(1.1, abs=0.04)


def test_of_a_long_trace_steps_are_kept_from_beginning_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncllm.lab.replay.steps.KEPT", 50)
    sample = Sample()
    for step in recorded(per_token):
        sample.add(step)
    times = [step.planned for step in sample.steps]
    assert 20 <= len(times) <= 50
    assert times == sorted(times)
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < 5 * sum(gaps) / len(gaps)
    kinds = calibrate([sample.steps], limits(), "made up").profile.kinds
    assert {kind.gap for kind in kinds} == {GAP}


@pytest.mark.parametrize("decode", [True, False])
def test_too_few_steps_are_refused(decode: bool) -> None:
    kept = [
        step for step in recorded(per_token) if (len(step.lengths) == step.lengths.sum()) == decode
    ]
    lacking = "with prompts" if decode else "without prompts"
    with pytest.raises(BadRequest, match=f"16 steps {lacking}, and the traces have 0"):
        calibrate([kept], limits(), "made up")


def test_least_squares_are_not_negative() -> None:
    rng = np.random.default_rng(1)
    columns = rng.random((200, 4))
    found = solve(columns, columns @ np.array([3.0, 0.0, 0.5, 2.0]))
    assert found == pytest.approx([3.0, 0.0, 0.5, 2.0], abs=1e-6)
    against = solve(columns, columns @ np.array([3.0, -1.0, 0.5, 2.0]))
    assert against[1] == 0.0
    assert (against >= 0.0).all()


# -- the host --------------------------------------------------------------------------------------


def test_requests_that_come_together_show_how_long_reading_one_takes(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "a"), Header("1", "fair", limits()))
    now, rng = 1.0, random.Random(1)
    for id in range(40):
        prompt = rng.randrange(10, 1000)
        now += 3e-4 + 1e-7 * prompt
        writer.write(Arrival(now, id, 0, 0, 0, prompt, 2000, 0, True, None, None), now)
    writer.close("done")
    request, token = request_seconds([Trace.read(str(tmp_path / "a"))])
    assert request == pytest.approx(3e-4, rel=0.01)
    assert token == pytest.approx(1e-7, rel=0.05)


def test_bursts_of_requests_show_how_long_an_answer_takes_to_begin(tmp_path: Path) -> None:
    """Between the results of a burst, the loop begins its answers, and reads the next requests."""
    host = HostTimes(launch=1e-3, token=1e-5, sent=2e-5, request=3e-4)
    writer = TraceWriter(str(tmp_path / "a"), Header("1", "fair", limits()))
    steps, now, id = [], 1.0, 0
    for number, firsts in enumerate([8, 5, 3, 12, 6]):
        lengths = np.array([100] * firsts + [1] * 10)
        writer.write(Result(now, 0.005, (), (), (), False), now)
        writer.write(Plan(number, now + 1e-4, None), now)
        zeros = np.zeros_like(lengths)
        steps.append(RecordedStep(zeros, lengths, len(lengths), 1, now, False, reported=now))
        now += 1e-4 + host.launch + 3e-5 * len(lengths) + 2e-4 * firsts
        for _ in range(3):
            now, id = now + host.request, id + 1
            writer.write(Arrival(now, id, 0, 0, 0, 100, 2000, 0, True, None, None), now)
        now += 0.004
    writer.close("done")
    traces = [Trace.read(str(tmp_path / "a"))]
    assert begin_seconds(traces, [steps], host) == pytest.approx(2e-4)
    assert begin_seconds(traces, [steps[:2]], host) == 0.0, "too few"


LAUNCH_US = 150.0


def step_figures(loop_us: float) -> StepFigures:
    """Of a loop that takes so long for a step, and waits for its launch while it plans."""
    return StepFigures(
        seconds=10.0,
        steps=1000,
        busy_share=1.0,
        launch_gap_us=None,
        result_lag_ms=None,
        plan_us=LAUNCH_US + 0.5 * loop_us,
        apply_us=0.0,
        deliver_us=0.5 * loop_us,
        launch_us=LAUNCH_US,
        collect_us=0.0,
    )


def offline_row(case: str, tokens_per_step: int, loop_us: float) -> OfflineRow:
    tokens = 1000 * tokens_per_step
    return OfflineRow(
        case=case,
        seconds=[10.0],
        in_tokens=1,
        out_tokens=tokens,
        tok_s=tokens / 10.0,
        ms_per_token=1.0,
        ttft_ms=1.0,
        engine=step_figures(loop_us),
    )


def online_row(case: str, tokens_per_step: float, loop_us: float, **changes: object) -> OnlineRow:
    row = OnlineRow(
        case=case,
        requests=1,
        failed=0,
        seconds=10.0,
        tok_s=100 * tokens_per_step,
        ttft_p50=7.0,
        ttft_p99=None,
        tpot_p50=None,
        itl_p50=None,
        itl_p99=None,
        itl_max=None,
        client_busy=0.0,
        engine=step_figures(loop_us),
    )
    return msgspec.structs.replace(row, **changes)


def empty_trace(path: Path, device: str) -> Trace:
    TraceWriter(str(path), Header("1", "fair", limits(device=device))).close("done")
    return Trace.read(str(path))


def test_bench_rows_show_the_time_of_the_loop_and_of_http(tmp_path: Path) -> None:
    online = [online_row("c1", 1, 210.0, clients=1), online_row("c64", 64, 840.0, clients=64)]
    offline = [offline_row("bs1", 1, 104.0), offline_row("bs64", 64, 356.0)]
    alone = RecordedStep(
        np.array([0]), np.array([128]), 1, 1, 5.0, alone=True, reported=5.0052, seconds=0.004
    )

    def found(device: str = "cuda", **rows: Any) -> HostTimes:
        trace = empty_trace(tmp_path / device, device)
        return host_times([trace], [[alone]], [Report(machine="", model="", **rows)])

    host = found(online=online, offline=offline)
    assert host.launch == pytest.approx(150e-6)
    assert host.step == pytest.approx(200e-6)
    assert host.token == pytest.approx(4e-6)
    assert host.sent == pytest.approx(6e-6)
    assert host.loop(64) == pytest.approx(150e-6 + 840e-6)
    assert host.client == pytest.approx(7.0e-3 - 5.2e-3 - host.loop(1))
    # Either kind alone tells what it can.
    http = found(online=online)
    assert (http.step, http.token, http.sent) == pytest.approx((200e-6, 10e-6, 0.0))
    inside = found(offline=offline)
    assert (inside.step, inside.token, inside.sent) == pytest.approx((100e-6, 4e-6, 0.0))
    on_cpu = found("cpu", online=online)
    assert (on_cpu.launch, on_cpu.step) == pytest.approx((0.0, 350e-6)), "it does not wait there"
    idle = online_row("idle", 0, 0.0, engine=msgspec.structs.replace(step_figures(0.0), steps=0))
    assert found(online=[*online, idle]) == http
    assert found() == HostTimes()


def test_a_loop_that_is_late_is_no_gap_of_the_device() -> None:
    """It was in one trace, and not in the other."""
    late = [step._replace(reported=step.reported + 2e-4) for step in recorded(per_token)]
    kinds = calibrate([late, recorded(per_token)], limits(), "made up").profile.kinds
    gaps = {kind.gap for kind in kinds if kind.name.startswith("decode")}
    assert gaps == {GAP}


# -- the command -----------------------------------------------------------------------------------


async def load_of(path: Path) -> None:
    rng = random.Random(5)
    async with AsyncLLM(
        device="sim", sim_profile="h200-8b", max_model_len=16384, trace=str(path)
    ) as llm:

        async def one(at: float, num_prompt: int, num_output: int) -> None:
            await asyncio.sleep(at)
            prompt = [rng.randrange(5, 2000) for _ in range(num_prompt)]
            await llm.generate(prompt, SamplingParams(max_tokens=num_output, ignore_eos=True))

        streams = [one(rng.random() / 4, 40, 60) for _ in range(24)]
        await asyncio.gather(*streams, *(one(0.3 + i * 0.2, 3000, 4) for i in range(8)))


def test_the_command_writes_a_profile_and_prints_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, file = tmp_path / "run.trace", tmp_path / "own.json"
    virtual_time.run(load_of(trace))
    assert main(["replay", str(trace), "--calibrate", str(file)]) == 0
    out = capsys.readouterr().out
    assert "all plans are the same" in out
    assert "decode, 9-32 rows" in out
    truth, found = shipped("h200-8b").steps, load(file).steps
    shape = StepShape.of(np.full(20, 60), np.ones(20, dtype=np.int64), 20)
    assert found.seconds(shape) == pytest.approx(truth.seconds(shape), rel=0.05)
    assert find_profile(str(file)) is not None


def test_the_command_refuses_what_makes_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (
        ["a", "b", "--what-if", "budget=300"],
        ["a", "--measured", "b"],
        ["a", "--calibrate", str(tmp_path / "none" / "b")],
    ):
        with pytest.raises(SystemExit):
            main(["replay", *line])
    TraceWriter(str(tmp_path / "a"), Header("1", "fair", limits())).close("empty")
    assert main(["replay", str(tmp_path / "a"), "--calibrate", str(tmp_path / "b")]) == 1
    assert "needs 16 steps without prompts" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
