"""What a trace holds and what it does not; and that recording never gets in the way."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.engine.policy import Fair, Policy
from asyncllm.engine.recording.page_ids import PageIds, Place
from asyncllm.engine.recording.record import RecordedScheduler, policy_name
from asyncllm.engine.recording.trace_file import (
    CHUNK,
    NEW_ROOT,
    Arrival,
    End,
    Finish,
    Header,
    Plan,
    Trace,
    TraceError,
    TraceWriter,
)
from asyncllm.lab.replay.verify import verify
from asyncllm.lab.replay.workload import PageTree
from asyncllm.wire.messages import pack
from tests.support.engine.recording import Driver
from tests.support.engine.scheduling import limits, sequence


def recorded(path: Path | str, **changes: int) -> RecordedScheduler:
    sched = RecordedScheduler.create(limits(**changes), Fair())
    sched.record_to(str(path))
    return sched


class Mine(Policy):
    """A user's own."""


# -- page numbers ----------------------------------------------------------------------------------


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from([b"", b"salt"]), st.lists(st.integers(0, 2), max_size=6)),
        min_size=1,
        max_size=25,
    ),
    st.randoms(use_true_random=False),
)
def test_pages_have_the_same_number_when_all_before_them_are_equal_too(
    sequences: list[tuple[bytes, list[int]]], rng: object
) -> None:
    ids = PageIds(2, limit=10**6, cached=lambda tokens, salt: False)
    tree = PageTree()
    numbers: dict[tuple[bytes, tuple[int, ...]], int] = {}
    for salt, pages in sequences:
        place, new = ids.enter(salt)
        data = pack([value for page in pages for value in (page, 7)])
        cut = len(pages) // 2 * 8
        place, known, num_new = ids.extend(place, data[:cut])
        node = tree.add(NEW_ROOT if new else known.node, num_new)
        assert node == place.node
        place, known, num_new = ids.extend(place, data[cut:])
        node = tree.add(known.node, num_new)
        assert node == place.node
        root, path = tree.path(node)
        assert len(path) == len(pages)
        for count, number in enumerate([root, *path]):
            prefix = (salt, tuple(pages[:count]))
            assert numbers.setdefault(prefix, number) == number
        ids.leave(place, len(pages))
    assert len(set(numbers.values())) == len(numbers)
    assert ids.num_nodes == len(numbers)


def enter_and_leave(ids: PageIds, tokens: list[int]) -> int:
    place, _known, num_new = ids.extend(ids.enter(b"")[0], pack(tokens))
    ids.leave(place, len(tokens))
    return num_new


def test_pages_are_forgotten_unless_somebody_can_meet_them() -> None:
    cached: set[tuple[int, ...]] = {(1,), (1, 2)}
    ids = PageIds(1, limit=3, cached=lambda tokens, salt: tuple(tokens) in cached)
    live, _, _ = ids.extend(ids.enter(b"")[0], pack([9, 9]))
    assert enter_and_leave(ids, [1]) == 1
    assert enter_and_leave(ids, [1, 2]) == 1
    for other in range(10, 50):
        assert enter_and_leave(ids, [other]) == 1
    assert ids.num_nodes <= 6
    assert enter_and_leave(ids, [1, 2]) == 0, "it is in the cache"
    assert enter_and_leave(ids, [9, 9]) == 0, "somebody has it"
    assert enter_and_leave(ids, [10]) == 1
    cached.clear()
    ids.leave(live, 2)
    for other in range(10, 50):
        enter_and_leave(ids, [other])
    assert ids.num_nodes <= 4
    assert enter_and_leave(ids, [1, 2]) == 2


def test_a_salt_is_forgotten_with_its_pages() -> None:
    ids = PageIds(1, limit=0, cached=lambda tokens, salt: False)
    for salt in (b"a", b"b", b"c"):
        place, _, _ = ids.extend(ids.enter(salt)[0], pack([1]))
        ids.leave(place, 1)
    assert ids.num_nodes == 0
    place, new = ids.enter(b"c")
    assert new
    assert place == Place(place.segment, 0)


# -- what is in the file ---------------------------------------------------------------------------


def test_a_trace_has_names_of_tenants_but_neither_tokens_nor_salts(tmp_path: Path) -> None:
    sched = recorded(tmp_path / "a")
    tokens = [0x61626364, 0x65666768, 0x696A6B6C, 0x6D6E6F70] * 4
    sched.add(sequence(1, tokens, tenant="key-1", cache_salt="pepper"), 1.0)
    sched.add(sequence(2, tokens, tenant="key-1", cache_salt="pepper"), 1.0)
    sched.finish(sequence(2, 1), 1.0)
    sched.stop_recording("done")
    data = (tmp_path / "a").read_bytes()
    assert data.count(b"key-1") == 1
    assert b"pepper" not in data
    assert not any(pack([token]) in data for token in tokens)


def test_an_event_takes_less_than_fifty_bytes(tmp_path: Path) -> None:
    driver = Driver(str(tmp_path / "a"), 1)
    driver.warm_up()
    driver.run(2000)
    driver.finish()
    trace = Trace.read(str(tmp_path / "a"))
    kinds = Counter(type(event) for event in trace.events())
    assert kinds[Arrival] == len(driver.ended)
    assert kinds[Plan] >= driver.plans
    assert (tmp_path / "a").stat().st_size < 40 * kinds.total()


def test_times_and_limits_come_back_exactly(tmp_path: Path) -> None:
    sched = recorded(tmp_path / "a", num_pages=33)
    seq = sequence(1, 5, arrival=0.1 + 0.2, deadline_ms=1e3 / 3, priority=-7, cache_ttl_s=1 / 7)
    seq.kv.shared = 3
    sched.add(seq, 1 / 3)
    sched.finish(seq, 2 / 3)
    sched.finish(seq, 0.7)
    sched.stop_recording("done")
    trace = Trace.read(str(tmp_path / "a"))
    assert trace.header.limits == sched.limits
    assert trace.header.policy == "fair"
    arrival, finish, end = trace.events()
    assert isinstance(arrival, Arrival)
    assert (arrival.now, arrival.arrival, arrival.deadline) == (
        1 / 3,
        0.1 + 0.2,
        seq.service.deadline,
    )
    assert (arrival.priority, arrival.cache_ttl, arrival.shared) == (-7, 1 / 7, 3)
    assert finish == Finish(2 / 3, 1)
    assert end == End("done")


def test_a_trace_from_before_there_were_pins_is_read() -> None:
    old = msgspec.msgpack.encode([0, 1.0, 7, "", 0, 0, 5, 9, 0, True, None, None, False])
    arrival = msgspec.msgpack.decode(old, type=Arrival)
    assert (arrival.id, arrival.cache_ttl, arrival.shared) == (7, None, 0)


def test_a_policy_without_a_name_goes_by_its_class() -> None:
    assert policy_name(Policy()) == "fcfs"
    assert policy_name(Mine()) == f"{__name__}.Mine"


def test_an_exception_of_the_scheduler_ends_the_trace_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sched = recorded(tmp_path / "a")
    sched.add(sequence(1, 5), 0.0)

    def broken(*args: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(sched._decode, "plan", broken)
    with pytest.raises(RuntimeError, match="planted"):
        sched.plan(0, 0.0)
    *_, plan, end = Trace.read(str(tmp_path / "a")).events()
    assert plan == Plan(0, 0.0, None)
    assert end == End("plan() raised RuntimeError('planted')")


# -- getting in the way ----------------------------------------------------------------------------


def test_a_full_trace_ends_with_one_line_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(str(tmp_path / "a"), 3, max_bytes=4000)
    driver.run(1000)
    driver.finish()
    assert driver.plans > 200
    [line] = caplog.records
    assert line.levelno == logging.WARNING
    assert "is full" in line.message
    assert 3900 < (tmp_path / "a").stat().st_size < 4100
    replayed = verify(Trace.read(str(tmp_path / "a")))
    assert replayed.mismatch is None
    assert replayed.workload.ended == "the file is as large as it may get"
    assert 10 < replayed.figures.num_steps < driver.plans


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_failing_disk_ends_the_recording_only(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver("/dev/full", 4)
    driver.run(200)
    driver.finish()
    assert driver.plans > 20
    [line] = caplog.records
    assert "cannot write the trace /dev/full" in line.message


def test_a_trace_that_cannot_be_created_raises_at_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot write the trace .*: Is a directory"):
        recorded(tmp_path)
    with pytest.raises(TraceError, match=r"cannot write the trace .*: No such file"):
        recorded(tmp_path / "nowhere" / "a")


def test_an_older_trace_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("precious")
    recorded(tmp_path / "a").stop_recording("done")
    assert (tmp_path / "a.old").read_text() == "precious"
    assert list(Trace.read(str(tmp_path / "a")).events()) == [End("done")]


def test_events_reach_the_file_in_chunks_or_after_a_second(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writer = TraceWriter(str(path), Header("0", "fair", limits()))
    header = path.stat().st_size
    assert header > 0
    writer.write(Finish(1.0, 1), 1.0)
    first = path.stat().st_size
    assert first > header, "nothing had been written for a second"
    writer.write(Finish(1.5, 2), 1.5)
    assert path.stat().st_size == first
    writer.write(Finish(2.1, 3), 2.1)
    assert path.stat().st_size > first
    for _ in range(CHUNK // 8):
        writer.write(Finish(2.1, 4), 2.1)
    assert path.stat().st_size > CHUNK
    writer.close("done")
    writer.close("done again")
    assert [*Trace.read(str(path)).events()][-1] == End("done")


def test_long_events_are_framed_too(tmp_path: Path) -> None:
    sched = recorded(tmp_path / "a")
    for id, length in enumerate((200, 255, 256, 70_000)):
        sched.add(sequence(id, 1, tenant="t" * length), 1.0)
    sched.stop_recording("done")
    *arrivals, _ = Trace.read(str(tmp_path / "a")).events()
    assert [len(str(a.tenant)) for a in arrivals if isinstance(a, Arrival)] == [
        200,
        255,
        256,
        70_000,
    ]


def test_a_tenant_may_be_no_text(tmp_path: Path) -> None:
    sched = recorded(tmp_path / "a")
    sched.add(sequence(1, 1, tenant="x\ud800"), 1.0)
    sched.stop_recording("done")
    arrival, _ = Trace.read(str(tmp_path / "a")).events()
    assert isinstance(arrival, Arrival)
    assert arrival.tenant == "x\\ud800"


def test_the_recorders_memory_is_bounded(tmp_path: Path) -> None:
    driver = Driver(str(tmp_path / "a"), 5, num_pages=20, page_size=2, max_model_len=40)
    recorder = driver.sched._recorder
    assert recorder is not None
    for _ in range(10):
        driver.run(300)
        driver.drain()
        assert recorder._ids.num_nodes <= 250
    for _ in range(50):
        driver.add()
        driver.drain()
    assert len(driver.ended) > 400
    assert recorder._ids.num_nodes <= 60
    assert not recorder._live
    assert len(recorder._leaving) <= 1
    driver.finish()
