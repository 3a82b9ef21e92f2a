"""Peers are started, watched and ended; none is ever left behind."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from asyncllm.executor.team.local import Monitor
from asyncllm.executor.team.process import PeerProcess
from asyncllm.system.json_log import JsonFormatter
from tests.support.team.team import Team

#: No wait of a test that passes takes this long.
LONG = 60.0


class Losses:
    """What a monitor reports."""

    def __init__(self) -> None:
        self.reports: SimpleQueue[tuple[int, str]] = SimpleQueue()

    def __call__(self, rank: int, reason: str) -> None:
        self.reports.put((rank, reason))

    def none_comes(self) -> bool:
        try:
            self.reports.get(timeout=0.6)
        except Empty:
            return True
        return False


@pytest.fixture
def team() -> Iterator[Team]:
    with Team(2) as team:
        yield team


@pytest.fixture
def losses(team: Team) -> Iterator[Losses]:
    losses = Losses()
    monitor = Monitor(team.peers, losses)
    yield losses
    monitor.close()


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_team_ends_when_the_ring_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    before = open_fds()
    with Team(2, padding="x" * 1_000_000) as team:
        team.send("work")
        team.close()
        assert [peer.exit_code for peer in team.peers] == [0, 0]
        assert [peer.last_operation()[:2] for peer in team.peers] == [("work", 1)] * 2
    assert caplog.text == ""
    assert open_fds() <= before  # others' may have been closed meanwhile


def test_peers_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('of the current folder')")
    monkeypatch.chdir(tmp_path)
    with Team(1) as team:
        team.send("work")
        assert team.peers[0].last_operation().operation == "work"


def test_a_killed_peer_is_reported_once(team: Team, losses: Losses) -> None:
    team.send("all_reduce")
    team.peers[1].kill()
    rank, reason = losses.reports.get(timeout=LONG)
    assert rank == 2
    assert f"rank 2 (process {team.peers[1].pid}) was killed by SIGKILL" in reason
    assert "its last operation was all_reduce of step 1, " in reason
    assert losses.none_comes()


def test_a_peer_that_exits_is_reported(team: Team, losses: Losses) -> None:
    team.writer.send(b"exit 3")
    reports = sorted(losses.reports.get(timeout=LONG) for _ in team.peers)
    assert [rank for rank, _ in reports] == [1, 2]
    assert all(") ended with exit code 3; " in reason for _, reason in reports)


def test_a_stopped_peer_is_reported_once_and_can_be_closed(team: Team, losses: Losses) -> None:
    os.kill(team.peers[0].pid, signal.SIGSTOP)
    rank, reason = losses.reports.get(timeout=LONG)
    assert rank == 1
    assert ") has been stopped for 0.5 s; it had begun nothing" in reason
    team.close(timeout=2.0)  # which the other peer may need on a busy machine
    assert [peer.exit_code for peer in team.peers] == [-signal.SIGKILL, 0]
    assert losses.none_comes()


def test_peers_that_are_closed_are_not_lost(team: Team, losses: Losses) -> None:
    team.close()
    assert losses.none_comes()


def test_a_monitor_can_be_closed_by_what_it_calls(team: Team) -> None:
    closed = threading.Event()
    monitors: SimpleQueue[Monitor] = SimpleQueue()

    def on_lost(rank: int, reason: str) -> None:
        monitors.get(timeout=LONG).close()
        closed.set()

    monitor = Monitor(team.peers, on_lost)
    monitors.put(monitor)
    team.peers[0].kill()
    assert closed.wait(LONG)
    monitor.close()


def test_an_error_in_reporting_does_not_end_the_watch(
    team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    losses = Losses()

    def on_lost(rank: int, reason: str) -> None:
        losses(rank, reason)
        raise RuntimeError("no")

    monitor = Monitor(team.peers, on_lost)
    for peer in team.peers:
        peer.kill()
        assert losses.reports.get(timeout=LONG)[0] == peer.rank
    monitor.close()
    assert caplog.text.count("RuntimeError: no") == 2


def test_a_peer_that_does_not_end_is_made_to() -> None:
    before = open_fds()
    with Team(1) as team:
        team.send("hang")
        [peer] = team.peers
        peer.close(timeout=0.01)
        assert peer.exit_code == -signal.SIGKILL
        assert peer.last_operation().operation == "hang"
        peer.close(timeout=0.01)
    assert open_fds() <= before  # others' may have been closed meanwhile


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_peer_leaves_stopping_to_its_parent(sent: signal.Signals, team: Team) -> None:
    for peer in team.peers:
        assert os.getsid(peer.pid) == peer.pid
        os.kill(peer.pid, sent)
    team.send("still here")


def test_log_lines_name_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with Team(1) as team:
        team.send("log")
    assert " WARNING [rank 1] peer: hello\n" in capfd.readouterr().err


def test_where_the_log_is_json_so_is_that_of_peers(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with Team(1) as team:
        team.send("log")
    line = json.loads(capfd.readouterr().err)
    assert line.pop("time").endswith("Z")
    assert line == {"level": "warning", "logger": "peer", "rank": 1, "message": "hello"}


@pytest.mark.parametrize("messages", [[], ["outlive the thread"], ["hang"]])
def test_a_peer_dies_with_its_parent(messages: list[str]) -> None:
    """Also without PR_SET_PDEATHSIG, which does not see every end."""
    command = [sys.executable, "-m", "tests.support.team.parent", *messages]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        peer = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    ended = poll.poll(LONG * 1000)
    os.close(peer)
    assert ended


def test_a_peer_dies_with_the_thread_that_started_it() -> None:
    teams = SimpleQueue[Team]()
    thread = threading.Thread(target=lambda: teams.put(Team(1).__enter__()))
    thread.start()
    team = teams.get(timeout=LONG)
    thread.join()
    poll = select.poll()
    poll.register(team.peers[0].pidfd, select.POLLIN)
    assert poll.poll(LONG * 1000)
    team.close()


def test_a_peer_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        PeerProcess(1, "tests.support.team.peer", {})
    assert open_fds() <= before  # others' may have been closed meanwhile


def test_the_team_needs_no_torch() -> None:
    code = "import sys, asyncllm.executor.team.local, asyncllm.executor.team.peer_main\n"
    code += "sys.exit('torch' in sys.modules or 'multiprocessing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
