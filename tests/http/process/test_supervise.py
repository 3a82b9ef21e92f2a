"""The parent process of a server: it holds the port and starts the server again when it dies."""

from __future__ import annotations

import errno
import http.client
import json
import os
import pty
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.server.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")

TLS_FILES = Path(__file__).parents[2] / "data" / "tls"
#: Seconds for anything to happen, on a machine that is very busy.
PATIENCE = 40.0

STREAM = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}


class Supervised:
    """A server, and the process that supervises it.

    Attributes:
        log: what both have written to stderr so far.
    """

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.log: list[str] = []
        assert process.stderr is not None
        self._reader = threading.Thread(target=self.log.extend, args=(process.stderr,))
        self._reader.start()
        self.port = 0

    @property
    def server(self) -> int:
        """The process id of the serving process."""
        [pid] = children(self.process.pid)
        return pid

    def until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "asyncllm is ready on http://127.0.0.1:" in line, (line, self.log)
        self.port = int(line.split("127.0.0.1:")[1].split()[0])

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any, bytes]:
        """Status, headers and body of an answer."""
        with closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        ) as connection:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def status(self, path: str) -> int:
        return self.ask("GET", path)[0]

    def end(self, seconds: float = PATIENCE) -> int:
        """Its exit code; it must end by itself."""
        code = self.process.wait(seconds)
        self._reader.join()
        return code


@contextmanager
def supervised(port: int = 0, drain_seconds: float = 20.0, **options: Any) -> Iterator[Supervised]:
    """A supervised fake server."""
    words = (str(port), str(drain_seconds), json.dumps(options), "supervised")
    with running_of("-W", "error", "-m", "tests.support.server.serve_fake", *words) as running:
        running.port = port
        yield running


@contextmanager
def running_of(*words: str) -> Iterator[Supervised]:
    """Python with these arguments."""
    pipe = subprocess.PIPE
    with own_session(sys.executable, *words, stdout=pipe, stderr=pipe, text=True) as process:
        yield Supervised(process)


@contextmanager
def own_session(*command: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process in a session of its own, of which nothing may be left."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()
    until(lambda: not session(process.pid))


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, of, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(of) == leader and state != "Z":
                found.append(int(folder.name))
    return found


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def is_closed(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def is_unavailable(running: Supervised) -> bool:
    """Whether the parent answers; a connection that the killed server had accepted is lost."""
    try:
        return running.status("/health") == 503
    except ConnectionError:  # as RemoteDisconnected is, too
        return False


def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    seen = tmp_path / "the outage was seen"
    with supervised(restart_when=str(seen)) as running:
        running.until_ready()
        first = running.server
        os.kill(first, signal.SIGKILL)
        # The port never closes; in between, the parent answers.
        until(lambda: is_unavailable(running))
        for method, path in (("GET", "/ready"), ("POST", "/v1/completions"), ("HEAD", "/health")):
            status, headers, body = running.ask(method, path)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert headers.get_content_type() == "application/json"
            if method != "HEAD":
                assert json.loads(body)["error"]["code"] == "not_ready"
        seen.touch()
        running.until_ready()
        assert running.status("/ready") == 200
        assert running.server != first
        running.process.terminate()
        assert running.end() == 0
    assert "the server has ended by SIGKILL" in "".join(running.log)


def test_an_outage_under_tls() -> None:
    cert, key = (str(TLS_FILES / f"first.{end}") for end in ("pem", "key"))
    context = ssl.create_default_context(cafile=cert)
    port = free_port()
    with supervised(port, server={"tls_cert": cert, "tls_key": key}) as running:
        until(lambda: bool(children(running.process.pid)))
        os.kill(running.server, signal.SIGSTOP)
        connection = http.client.HTTPSConnection(
            "localhost", port, timeout=PATIENCE, context=context
        )
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert json.load(answer)["error"]["code"] == "not_ready"
        connection.close()
        os.kill(running.server, signal.SIGCONT)
        running.process.terminate()
        assert running.end() == 0


def test_the_server_dies_with_its_parent() -> None:
    with supervised() as running:
        running.until_ready()
        server = running.server
        for place in ("fd", "map_files"):  # nothing that could be left in /dev/shm
            with suppress(PermissionError):
                for link in Path(f"/proc/{server}/{place}").iterdir():
                    assert not os.readlink(link).startswith("/dev/shm")
        running.process.kill()
        until(lambda: is_closed(running.port))


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_hundred_streams_finish_after_a_signal(whole_group: bool) -> None:
    """Ctrl-C reaches both processes, which must not count as a second one."""
    with supervised(step_seconds=0.05, max_running=100, max_waiting=100) as running:
        running.until_ready()
        streams = []
        for _ in range(100):
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE)
            connection.request("POST", "/generate", json.dumps(STREAM))
            streams.append(connection)
        answers = [stream.getresponse() for stream in streams]
        if whole_group:
            os.killpg(running.process.pid, signal.SIGINT)
        else:
            running.process.terminate()
        until(lambda: running.status("/ready") == 503)
        assert running.status("/health") == 200
        for answer in answers:
            assert b'"finish_reason":"length"' in (text := answer.read())
            assert text.endswith(b"data: [DONE]\n\n")
        assert running.end() == 0
        for stream in streams:
            stream.close()
    assert "cutting" not in "".join(running.log)


def test_a_second_signal_cuts_streams_off() -> None:
    with supervised(step_seconds=0.05) as running:
        running.until_ready()
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE)
        connection.request("POST", "/generate", json.dumps({**STREAM, "max_tokens": 4000}))
        answer = connection.getresponse()
        running.process.terminate()
        until(lambda: running.status("/ready") == 503)
        time.sleep(0.3)  # sooner it would count as the first one again
        running.process.terminate()
        *_, error, done, _ = answer.read().decode().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "not_ready"
        assert done == "data: [DONE]"
        assert running.end() == 0
        connection.close()


def test_a_server_that_does_not_end_is_killed() -> None:
    with supervised() as running:
        running.until_ready()
        os.kill(running.server, signal.SIGSTOP)
        for _ in range(3):
            running.process.terminate()
            time.sleep(0.3)
        assert running.end() == 128 + signal.SIGKILL


def test_a_server_that_is_stopped_directly_is_not_started_again() -> None:
    with supervised() as running:
        running.until_ready()
        os.kill(running.server, signal.SIGTERM)
        assert running.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_starts(number: signal.Signals) -> None:
    with supervised(load_seconds=60) as running:
        until(lambda: bool(children(running.process.pid)))
        running.process.send_signal(number)
        assert running.end() == 0
        assert running.log == []


def test_a_start_error_ends_both() -> None:
    """It looks as it does without a parent."""
    with supervised(load_error="expected") as running:
        assert running.end() == 1
        assert running.log == ["cannot load the model: no such model\n"]


def test_a_server_that_is_killed_while_it_loads() -> None:
    with supervised(load_seconds=60) as running:
        until(lambda: bool(children(running.process.pid)))
        os.kill(running.server, signal.SIGKILL)
        assert running.end() == 128 + signal.SIGKILL
        [line] = running.log
        assert line.startswith("the server has ended by SIGKILL")
        assert "before it was ready" in line


def test_a_server_that_is_stopped_is_replaced() -> None:
    """While it starts, loads and serves."""
    with supervised(first={"load_seconds": 60}) as running:
        until(lambda: bool(children(running.process.pid)))
        os.kill(running.server, signal.SIGSTOP)
        running.until_ready()
        os.kill(running.server, signal.SIGSTOP)
        running.until_ready()
        assert running.status("/ready") == 200
        running.process.terminate()
        assert running.end() == 0
    assert "".join(running.log).count("the server is stopped: killing it") == 2


def test_a_dead_engine_restarts_the_server_with_growing_delays() -> None:
    with supervised(life_seconds=0.1) as running:
        running.until_ready()  # dies: again at once
        running.until_ready()  # dies: in a second
        until(lambda: "starting it again in 1 s" in "".join(running.log))
        status, headers, _ = running.ask("GET", "/health")
        assert (status, headers["Retry-After"]) == (503, "1")
        running.process.terminate()  # nothing runs now, or it is starting
        assert running.end() == 0
        log = "".join(running.log)
        assert "the engine died: planted death" in log
        assert "with status 70, its engine dead or stalled: starting it again now" in log


def test_a_closed_terminal_ends_the_server_and_a_hang_up_signal_does_not() -> None:
    command = [sys.executable, "-m", "tests.support.server.serve_fake", "0", "5", "{}"]
    for mode in ([], ["supervised"]):
        pid, terminal = pty.fork()
        if pid == 0:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
            os.execv(sys.executable, [*command, *mode])
        said = b""
        while b"is ready on" not in said:
            said += os.read(terminal, 1000)
        os.kill(pid, signal.SIGHUP)
        time.sleep(0.3)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not session(pid)


def test_the_parent_is_small() -> None:
    with supervised() as running:
        running.until_ready()
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        [rss] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
        assert rss < 40_000, "KiB"
        maps = Path(f"/proc/{running.process.pid}/maps").read_text()
        assert "torch" not in maps
        assert "aiohttp" not in maps
        running.process.terminate()
        assert running.end() == 0
