"""Children that do not do what they owe their parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from asyncllm.supervise.child import PING
from asyncllm.supervise.server import PATIENCE, STILL_CHECKS, STOPPED_CHECKS, Progress, Server
from asyncllm.supervise.standby import AT_ONCE, IMPORT, IMPORT_SOON, Standby

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    """Python that runs this, after its first line of output."""
    command = [sys.executable, "-c", f"print(flush=True)\n{code}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def checks_until_lost(check: Callable[[], str | None], most: int = 2000) -> tuple[int, str]:
    for count in range(1, most):
        if (why := check()) is not None:
            return count, why
    raise AssertionError("it was never lost")


def until_asleep(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        pass


@pytest.mark.parametrize("patience", [None, 100])
def test_a_stopped_child_is_lost_unless_it_goes_on(patience: int | None) -> None:
    with child("import time; time.sleep(600)") as process:
        progress = Progress(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        for _ in range(STOPPED_CHECKS - 1):
            assert progress.check(patience) is None
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert progress.check(patience) is None
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert checks_until_lost(lambda: progress.check(patience)) == (STOPPED_CHECKS, "is stopped")


def test_a_child_that_sleeps_is_lost_when_it_owes_something() -> None:
    with child("import time; time.sleep(600)") as process:
        until_asleep(process.pid)
        progress = Progress(process.pid)
        assert not any(progress.check(None) for _ in range(1000))
        count, why = checks_until_lost(lambda: progress.check(1000))
        assert (count, why) == (STILL_CHECKS + 1, "hangs: it has done nothing for 15 s")


def test_a_child_that_is_busy_for_ever_is_lost() -> None:
    with child("while True: pass") as process:
        progress = Progress(process.pid)
        assert checks_until_lost(lambda: progress.check(50)) == (
            50,
            "hangs: it is not done after 50 s",
        )


def test_a_child_that_has_ended_is_not_lost() -> None:
    with child("") as process:
        progress = Progress(process.pid)
        process.wait()
        assert progress.check(1) is None


@pytest.mark.parametrize("has_answered", [True, False])
def test_a_standby_answers_while_it_waits(has_answered: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with child("while True: pass") as process, theirs:
        standby = Standby()
        standby.began(process.pid, ours)
        for _ in range(3 * STILL_CHECKS if has_answered else 0):
            assert standby.check() is None
            assert theirs.recv(10) == PING
            theirs.send(PING)
        count, why = checks_until_lost(standby.check)
        assert count == (AT_ONCE + 1 if has_answered else IMPORT + 1)
        assert why.startswith("hangs: it is not done")
        taken = standby.take_over(3, None)
        assert taken == (process.pid, ours, AT_ONCE if has_answered else IMPORT_SOON)
        ours.close()


@pytest.mark.parametrize("stood_by", [True, False])
def test_a_server_owes_to_accept_connections(stood_by: bool) -> None:
    with child("while True: pass") as process:
        server = Server(0)
        server.began(process.pid, socket.socket(), AT_ONCE if stood_by else None)
        count, _ = checks_until_lost(server.check)
        assert count == (AT_ONCE if stood_by else PATIENCE)
        server.accepted(None)
        assert not any(server.check() for _ in range(2 * PATIENCE))
        server.ended()
        assert server.check() is None
