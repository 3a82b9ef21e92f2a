"""What the watchdog counts, and the files that it writes."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.stats import EngineStats
from asyncllm.errors import BadRequest
from asyncllm.server.crash_report import MAX_REPORT_BYTES, MAX_REPORTS, CrashReports, describe
from asyncllm.server.request_log import RequestLog, Served
from asyncllm.server.watchdog import LENGTHY_SECONDS, STALL_SECONDS, Stillness, Watchdog
from asyncllm.wire.heartbeat import Heartbeat
from tests.support.engine.scheduling import limits

if TYPE_CHECKING:
    from pathlib import Path


def test_stillness_counts_while_nothing_changes() -> None:
    still = Stillness()
    assert [still.look("a", 1.0), still.look("a", 1.0), still.look("a", 2.0)] == [0.0, 1.0, 3.0]
    assert [still.look("b", 1.0), still.look("b", 1.0)] == [0.0, 1.0]
    still.start_again()
    assert still.look("b", 1.0) == 1.0


def service_of(device: str = "cuda", **options: Any) -> Any:
    """A service with an engine that has done nothing yet."""
    vitals = SimpleNamespace(
        heartbeat=Heartbeat(),
        oldest_step=lambda: (7, [1, 2]),
        latest_steps=lambda most: [],
        live_requests=lambda most: [],
    )
    llm = SimpleNamespace(
        vitals=vitals,
        healthy=True,
        limits=limits(device=device),
        config=EngineConfig(),
        stats=EngineStats(),
    )
    log = RequestLog()
    log.add("tenant", ("mine", "cmpl-1"), Served([1]))
    return SimpleNamespace(llm=llm, config=ServerConfig(**options), log=log)


def test_a_step_stalls_only_while_nothing_at_all_happens() -> None:
    service = service_of()
    watchdog, heartbeat = Watchdog(service), service.llm.vitals.heartbeat

    def looked(elapsed: float) -> bool:
        return watchdog._stalled_step(elapsed) is not None

    assert not looked(2 * STALL_SECONDS), "no step is in flight"
    heartbeat.submitted(7)
    heartbeat.enter("launch", 7)
    assert not looked(1.0)
    assert not looked(STALL_SECONDS - 1)
    heartbeat.enter("wait", 7)
    assert not looked(STALL_SECONDS), "it has begun to wait"
    assert not looked(STALL_SECONDS - 1)
    stall = watchdog._stalled_step(1.0)
    assert stall is not None
    assert stall.message == f"step 7 has made no progress for {STALL_SECONDS:.0f} s"
    assert stall.detail.endswith("requests 1 (mine), 2")
    heartbeat.enter("compile", 7)
    assert not looked(1.0)
    assert not looked(LENGTHY_SECONDS - 1)
    assert looked(1.0), "a compiler hangs, too"
    heartbeat.finished()
    assert not looked(LENGTHY_SECONDS)


def test_a_step_stalls_where_a_peer_does() -> None:
    """Rank 0 only waits for it; and what a peer compiles may take long as well."""
    service = service_of()
    watchdog, heartbeat, peer = Watchdog(service), service.llm.vitals.heartbeat, Heartbeat()
    heartbeat.peers = [SimpleNamespace(rank=1, operation=lambda: peer.operation)]
    heartbeat.submitted(7)
    heartbeat.enter("wait", 7)
    peer.enter("compile", 7)
    assert watchdog._stalled_step(1.0) is None
    assert watchdog._stalled_step(2 * STALL_SECONDS) is None
    peer.enter("launch", 7)
    assert watchdog._stalled_step(1.0) is None
    assert watchdog._stalled_step(STALL_SECONDS - 1) is None
    stall = watchdog._stalled_step(1.0)
    assert stall is not None
    assert re.search(r"the executor is in 'wait' .* s, rank 1 is in 'launch' ", stall.detail)


@pytest.mark.parametrize(
    ("device", "options", "seconds"),
    [("cuda", {}, 30.0), ("cpu", {}, 300.0), ("cpu", {"stall_seconds": 5.0}, 5.0)],
)
def test_the_limit(device: str, options: dict[str, float], seconds: float) -> None:
    assert Watchdog(service_of(device, **options)).step_seconds == seconds


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as raised:
        ServerConfig(stall_seconds=-1.0)
    assert raised.value.param == "stall_seconds"
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="cannot be written to") as raised:
        CrashReports(str(tmp_path / "file"))
    assert raised.value.param == "crash_dir"


def test_reports_are_few_small_and_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(api_key=("hidden",), api_key_file="hidden-file", admin_key="hidden, too")
    reports = CrashReports(str(tmp_path / "made"))
    for number in range(MAX_REPORTS + 2):
        monkeypatch.setattr("os.getpid", lambda number=number: 100 + number)
        monkeypatch.setattr("time.strftime", lambda *_: "20261123T000000")
        path = reports.write(describe(service, f"cause {number}", "x" * 10 * MAX_REPORT_BYTES))
        assert path is not None
        assert path.stat().st_size <= MAX_REPORT_BYTES
        assert path.stat().st_mode & 0o777 == 0o600
    left = sorted((tmp_path / "made").iterdir())
    assert len(left) == MAX_REPORTS
    assert json.loads(left[-1].read_text())["cause"] == f"cause {MAX_REPORTS + 1}"
    assert "hidden" not in left[-1].read_text()


def test_a_report_that_is_too_large_loses_its_largest_part(tmp_path: Path) -> None:
    path = CrashReports(str(tmp_path)).write({"cause": "c", "requests": ["x" * MAX_REPORT_BYTES]})
    assert path is not None
    assert json.loads(path.read_text()) == {"cause": "c", "requests": "left out: too large"}


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    service = service_of()
    service.llm.vitals.live_requests = None
    assert describe(service, "c", "")["requests"] == "not known: TypeError"
    assert CrashReports(None).write({}) is None
