"""What was recorded can be replayed to the same plans; and what is no trace is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncllm import SamplingParams
from asyncllm.__main__ import main
from asyncllm.engine.policy import POLICIES, Policy
from asyncllm.engine.recording.record import RecordedScheduler
from asyncllm.engine.recording.trace_file import (
    FORMAT,
    MAGIC,
    Header,
    Plan,
    PlanDigest,
    Trace,
    TraceError,
    TraceWriter,
)
from asyncllm.engine.recording.trace_parts import make_part
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.step import Planned
from asyncllm.lab.replay.verify import verify
from tests.support.engine.recording import TIGHT, Driver, record, replay, unchecked
from tests.support.engine.scheduling import limits, sequence

SHAPES = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 4]),
        "num_pages": st.integers(16, 40),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(8, 24),
        "prefill_chunk": st.integers(1, 24),
        "max_decode_steps": st.sampled_from([1, 1, 3]),
        "steps_in_flight": st.integers(1, 2),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "host_pages": st.sampled_from([0, 4, 60]),
        "max_draft_tokens": st.sampled_from([0, 0, 3]),
    }
)

BEGIN = MAGIC + bytes([FORMAT])

# -- the same plans --------------------------------------------------------------------------------


@pytest.mark.slow
@settings(
    max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shape=SHAPES, policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 2**32))
def test_any_run_replays_to_the_same_plans(
    tmp_path: Path, shape: dict[str, Any], policy: str, seed: int
) -> None:
    if not shape["prefix_caching"]:
        shape["host_pages"] = 0
    shape["max_model_len"] = shape["num_pages"] * shape["page_size"]
    driver = record(tmp_path / "a", seed, policy=policy, **shape)
    replayed = replay(tmp_path / "a")
    assert replayed.mismatch is None
    figures = replayed.figures
    assert figures.num_requests == len(driver.ended)
    assert figures.num_steps == driver.plans
    assert figures.num_tokens == sum(seq.num_output for seq in driver.ended)
    assert figures.num_preemptions == driver.sched.departures.num_preemptions
    admitted = [seq for seq in driver.ended if seq.num_cached >= 0]
    assert figures.cached_tokens == sum(seq.num_cached for seq in admitted)
    # A cut anywhere loses what follows, and nothing else.
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "cut").write_bytes(data[: 700 + seed % (len(data) - 700)])
    cut = replay(tmp_path / "cut")
    assert cut.mismatch is None
    assert cut.workload.ended is None
    assert cut.figures.num_steps <= driver.plans


@pytest.mark.parametrize("host_pages", [0, 40])
def test_preempted_requests_replay(tmp_path: Path, host_pages: int) -> None:
    preemptions = 0
    for seed in range(8):
        driver = record(tmp_path / "a", seed, events=500, host_pages=host_pages, **TIGHT)
        preemptions += driver.sched.departures.num_preemptions
        assert replay(tmp_path / "a").mismatch is None
    assert preemptions > 4


@pytest.mark.parametrize("num_states", [8, 10, 40])
def test_recurrent_states_replay(tmp_path: Path, num_states: int) -> None:
    used = 0
    for seed in range(4):
        driver = record(tmp_path / "a", seed, events=400, num_states=num_states, **TIGHT)
        used += driver.sched.cache.states.num_used
        assert driver.sched.leak_check.mismatch() is None
        assert replay(tmp_path / "a").mismatch is None
    assert used > 0


def test_drafts_replay(tmp_path: Path) -> None:
    for seed in range(4):
        driver = record(tmp_path / "a", seed, events=400, max_draft_tokens=3, **TIGHT)
        assert driver.sched.leak_check.mismatch() is None
        assert driver.num_right > 10
        assert replay(tmp_path / "a").mismatch is None


def test_pins_that_gave_way_replay(tmp_path: Path) -> None:
    for seed in range(3):
        tight = {"page_size": 2, "num_pages": 24, "max_model_len": 48, "max_num_seqs": 4}
        driver = record(tmp_path / "a", seed, **tight)
        assert driver.sched.cache.pins.num_evicted > 0
        assert replay(tmp_path / "a").mismatch is None


def test_generated_pages_are_hits_in_the_replay_as_well(tmp_path: Path) -> None:
    driver = Driver(str(tmp_path / "a"), 0)
    driver.errors = False
    sched = driver.sched
    first = driver.live[1] = sequence(1, 6, 20, SamplingParams(max_tokens=20, ignore_eos=True))
    sched.add(first, 0.0)
    while driver.live:
        driver.plan()
        driver.land()
    second = driver.live[2] = sequence(2, [*first.tokens, 3, 3], 2)
    sched.add(second, 0.0)
    driver.finish()
    assert second.num_cached == 24, "its first turn's pages but the last"
    replayed = replay(tmp_path / "a")
    assert replayed.mismatch is None
    assert replayed.figures.cached_tokens == 24


@pytest.mark.slow
def test_hash_seeds_change_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.unit.lab.replay.test_replay import *; path = Path(sys.argv[1]);"
        "record(path, 11, events=400, host_pages=30, **TIGHT);"
        "print(replay(path).mismatch, hashlib.sha256(path.read_bytes()).hexdigest())"
    )
    said = set()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[4],
            capture_output=True,
            text=True,
            check=True,
        )
        said.add(run.stdout)
    record(tmp_path / "a", 11, events=400, host_pages=30, **TIGHT)
    digest = hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    assert said == {f"None {digest}\n"}


# -- other plans, and what is no trace -------------------------------------------------------------


def rewrite(path: Path, new: Path, header: Header, changed: dict[int, PlanDigest | None]) -> None:
    """A copy with another header, and other digests for some steps."""
    writer = TraceWriter(str(new), header)
    for event in Trace.read(str(path)).events():
        if isinstance(event, Plan) and event.number in changed:
            event = msgspec.structs.replace(event, digest=changed[event.number])
        writer.write(event, 0.0)
    writer.close("rewritten")


@pytest.mark.parametrize(
    ("digest", "what"),
    [
        (PlanDigest(1, 2, 3, 4), "rows, new pages, copies, admits"),
        (None, "there was nothing to run"),
    ],
)
def test_the_first_plan_that_differs_is_named(
    tmp_path: Path, digest: PlanDigest | None, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "a", 1)
    trace = Trace.read(str(tmp_path / "a"))
    numbers = [event.number for event in trace.events() if isinstance(event, Plan)]
    # One that was not in vain before.
    step = next(number for number in numbers if number >= 50 and numbers.count(number) == 1)
    rewrite(tmp_path / "a", tmp_path / "b", trace.header, {step: digest})
    assert main(["replay", str(tmp_path / "b")]) == 1
    captured = capsys.readouterr()
    assert "plans differ" in captured.out
    assert f"error: step {step}, at" in captured.err
    assert f"what differs: {what}" in captured.err


def test_other_limits_give_other_plans(tmp_path: Path) -> None:
    record(tmp_path / "a", 1)
    header = Trace.read(str(tmp_path / "a")).header
    fewer = msgspec.structs.replace(header.limits, max_num_batched_tokens=9)
    changed = msgspec.structs.replace(header, limits=fewer)
    rewrite(tmp_path / "a", tmp_path / "b", changed, {})
    mismatch = replay(tmp_path / "b").mismatch
    assert mismatch is not None
    assert "rows" in mismatch.what


def test_an_exception_is_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def broken(self: Scheduler, number: int, now: float) -> Planned | None:
        if number == 20:
            raise RuntimeError("planted")
        return plan(self, number, now)

    monkeypatch.setattr(Scheduler, "plan", broken)
    driver = Driver(str(tmp_path / "a"), 1)
    with pytest.raises(RuntimeError):
        driver.run(1000)
    replayed = replay(tmp_path / "a")
    assert replayed.workload.ended == "plan() raised RuntimeError('planted')"
    assert replayed.mismatch is not None
    assert replayed.mismatch.step == 20
    assert replayed.mismatch.what == "the scheduler raised RuntimeError('planted')"


class Mine(Policy):
    """A user's own."""


def test_a_policy_of_the_users_own_must_be_passed(tmp_path: Path) -> None:
    sched = RecordedScheduler.create(limits(), Mine())
    sched.record_to(str(tmp_path / "a"))
    sched.stop_recording("done")
    with pytest.raises(TraceError, match=r"recorded with the policy tests.*\.Mine: pass it"):
        replay(tmp_path / "a")
    assert verify(Trace.read(str(tmp_path / "a")), Mine()).mismatch is None


def test_another_version_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TraceWriter(str(tmp_path / "a"), Header("0.0.1", "fair", limits())).close("done")
    assert main(["replay", str(tmp_path / "a")]) == 0
    assert "recorded by asyncllm 0.0.1, replayed by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a trace of asyncllm"),
        (b"{}\n" * 100, "is not a trace of asyncllm"),
        (MAGIC + bytes([FORMAT + 1]) + bytes(4), f"has format {FORMAT + 1}; asyncllm"),
        (MAGIC + bytes([FORMAT]) + b"\xff\x00\x00\x00abc", "is cut off within its header"),
        (BEGIN + make_part(b"\x80", crc32(BEGIN))[0], "does not suit asyncllm"),
        (BEGIN + make_part(b"\x80", crc32(MAGIC))[0], "is damaged at byte 16: "),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_bytes(content)
    assert main(["replay", str(tmp_path / "a")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "a")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "No such file" in line


@pytest.mark.slow
@settings(
    max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0), byte=st.integers(0, 255))
def test_damage_never_ends_in_a_traceback(tmp_path: Path, at: int, byte: int) -> None:
    if not (tmp_path / "a").exists():
        record(tmp_path / "a", 1, events=60)
    # Checksums would find it at once.
    data = bytearray(unchecked((tmp_path / "a").read_bytes()))
    data[-1 - at % (len(data) - 500)] = byte  # not in the header
    (tmp_path / "b").write_bytes(data)
    assert main(["replay", str(tmp_path / "b")]) in (0, 1)


def test_zeros_at_the_end_are_a_cut(tmp_path: Path) -> None:
    record(tmp_path / "a", 1)
    with open(tmp_path / "a", "ab") as file:
        file.write(bytes(1000))
    assert replay(tmp_path / "a").mismatch is None
