"""A process that stands by, and becomes the server when the server dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.http.process.test_supervise import (
    Supervised,
    children,
    is_closed,
    running_of,
    session,
    until,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")

STANDS_BY = "standing by after"


def serving(*options: str, device: str = "cpu") -> AbstractContextManager[Supervised]:
    """The demo model; the device "sim" takes less time to start."""
    command = ("-m", "asyncllm", "serve", "--device", device, "--cpu-threads", "1", "--port", "0")
    return running_of(*command, *options)


def standby_of(running: Supervised, number: int = 1) -> tuple[int, int]:
    """The process ids of the server and of its standby, when the standby of this number waits."""
    until(lambda: "".join(running.log).count(STANDS_BY) == number)
    server, standby = children(running.process.pid)
    return server, standby


def answer_of(running: Supervised) -> str:
    body = {"prompt": "What is 27 + 45?", "max_tokens": 4, "temperature": 0}
    status, _, answer = running.ask("POST", "/v1/completions", body)
    assert status == 200, answer
    text: str = json.loads(answer)["choices"][0]["text"]
    return text


def test_each_standby_is_the_next_server() -> None:
    with serving("--standby") as running:
        running.until_ready()
        first, second = standby_of(running)
        text = answer_of(running)
        os.kill(first, signal.SIGKILL)
        running.until_ready()
        assert answer_of(running) == text
        server, third = standby_of(running, 2)
        assert server == second
        os.kill(second, signal.SIGKILL)
        running.until_ready()
        assert answer_of(running) == text
        assert standby_of(running, 3)[0] == third
        running.process.terminate()
        assert running.end() == 0
        assert not session(running.process.pid)
    log = "".join(running.log)
    assert "starting it again now" in log
    assert "starting it again in 1 s" in log, "a standby waits like any other start"


def test_a_server_whose_standby_has_died_is_started_as_without_one() -> None:
    with serving("--standby", device="sim") as running:
        running.until_ready()
        server, standby = standby_of(running)
        os.kill(standby, signal.SIGKILL)
        until(lambda: "the standby has ended by SIGKILL" in "".join(running.log))
        assert children(running.process.pid) == [server]
        answer_of(running)
        os.kill(server, signal.SIGKILL)
        running.until_ready()
        answer_of(running)
        assert not {server, standby} & {*standby_of(running, 2)}
        running.process.terminate()
        assert running.end() == 0


def test_a_standby_that_is_not_done_yet_takes_over_when_it_is() -> None:
    with serving("--standby", device="sim") as running:
        running.until_ready()
        until(lambda: len(children(running.process.pid)) == 2)
        server, standby = children(running.process.pid)
        os.kill(standby, signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        until(lambda: "starting it again now" in "".join(running.log))
        os.kill(standby, signal.SIGCONT)
        running.until_ready()
        answer_of(running)
        assert standby_of(running, 2)[0] == standby


def test_a_standby_that_is_stopped_is_replaced_and_outlives_its_server() -> None:
    """Whether the parent has noticed before it is needed or not."""
    with serving("--standby", device="sim") as running:
        running.until_ready()
        first, standby = standby_of(running)
        os.kill(standby, signal.SIGSTOP)
        second = standby_of(running, 2)[1]
        assert standby not in children(running.process.pid)
        os.kill(second, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        running.until_ready()
        answer_of(running)
        assert not {first, standby, second} & {*standby_of(running, 3)}
        running.process.terminate()
        assert running.end() == 0
    log = "".join(running.log)
    assert "the standby is stopped: starting another one" in log
    assert "the standby has ended by SIGKILL: starting a server without it" in log
    assert "starting it again in" not in log, "it was no server that had died"


def test_server_and_standby_die_at_once() -> None:
    with serving("--standby", device="sim") as running:
        running.until_ready()
        dead = standby_of(running)
        running.process.send_signal(signal.SIGSTOP)
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        running.process.send_signal(signal.SIGCONT)
        running.until_ready()
        answer_of(running)
        assert not {*dead} & {*standby_of(running, 2)}
        running.process.terminate()
        assert running.end() == 0


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_standby_dies_with_its_parent(is_stopped: bool) -> None:
    with serving("--standby", device="sim") as running:
        running.until_ready()
        _, standby = standby_of(running)
        if is_stopped:
            os.kill(standby, signal.SIGSTOP)
        running.process.kill()
        until(lambda: not session(running.process.pid))
        until(lambda: is_closed(running.port))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_signal_leaves_nothing(number: signal.Signals, whole_group: bool) -> None:
    with serving("--standby", device="sim") as running:
        running.until_ready()
        standby_of(running)
        if whole_group:
            os.killpg(running.process.pid, number)
        else:
            running.process.send_signal(number)
        assert running.end() == 0
        assert not session(running.process.pid)
        assert is_closed(running.port)
    assert "standby" not in "".join(running.log)


def test_a_server_that_is_stopped_directly_takes_its_standby_along() -> None:
    with serving("--standby", device="sim") as running:
        running.until_ready()
        server, _ = standby_of(running)
        os.kill(server, signal.SIGTERM)
        assert running.end() == 0
        assert not session(running.process.pid)


def test_a_standby_serves_what_was_in_force(tmp_path: Path) -> None:
    """Not what the configuration says when it starts, or when it takes over."""
    file = tmp_path / "serve.yaml"
    file.write_text("served-model-name: old\nstandby: true\n")

    def name() -> str:
        found: str = json.loads(running.ask("GET", "/v1/models")[2])["data"][0]["id"]
        return found

    with serving("--config", str(file), device="sim") as running:
        running.until_ready()
        server, standby = standby_of(running)
        file.write_text("served-model-name: new\n")
        running.process.send_signal(signal.SIGHUP)
        until(lambda: name() == "new")
        file.write_text("served-model-name: never\n")
        assert children(running.process.pid) == [server, standby]
        os.kill(server, signal.SIGKILL)
        running.until_ready()
        assert name() == "new"
        assert standby_of(running, 2)[0] == standby, "still with an option of the start"


def test_there_is_none_on_a_cpu_unless_asked_for() -> None:
    with serving() as running:
        running.until_ready()
        answer_of(running)
        assert len(children(running.process.pid)) == 1


def test_a_standby_ends_when_its_channel_does() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (
        "import socket, sys\n"
        "from asyncllm.supervise.child import Parent\n"
        "Parent((), socket.socket(fileno=int(sys.argv[1])), is_standby=True).stand_by()\n"
        "sys.exit('it was to end')"
    )
    with theirs:
        number = str(theirs.fileno())
        process = subprocess.Popen([sys.executable, "-c", code, number], pass_fds=[theirs.fileno()])
    ours.close()
    assert process.wait(40) == 0


@pytest.mark.parametrize("standby", [True, False])
def test_a_configuration_told_between_two_servers_holds(standby: bool, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("served-model-name: old\n")
    options = ("--standby",) if standby else ()

    def name() -> str:
        found: str = json.loads(running.ask("GET", "/v1/models")[2])["data"][0]["id"]
        return found

    with serving("--config", str(file), *options, device="sim") as running:
        for number in (1, 2):
            running.until_ready()
            assert name() == "old"
            if standby:
                standby_of(running, number)
            os.kill(children(running.process.pid)[0], signal.SIGKILL)
        until(lambda: "starting it again in 1 s" in "".join(running.log))
        file.write_text("served-model-name: new\n")
        running.process.send_signal(signal.SIGHUP)
        running.until_ready()
        until(lambda: name() == "new")
