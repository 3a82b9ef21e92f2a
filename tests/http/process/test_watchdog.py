"""A real process whose step, or whose event loop, makes no progress."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from asyncllm.server.watchdog import GAP_SECONDS
from asyncllm.supervise.signals import DEAD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: For a process that has to end to be noticed, on a busy machine.
SECONDS = 20


class Running:
    """A server process; its connections are closed at the end of the test."""

    def __init__(self, process: subprocess.Popen[str], port: int, stack: ExitStack):
        self.process = process
        self._port = port
        self._stack = stack

    def send(self, method: str, path: str, body: Any = None) -> http.client.HTTPConnection:
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        self._stack.callback(client.close)
        headers = {"Authorization": "Bearer hidden", "X-Request-Id": "named"}
        client.request(method, path, None if body is None else json.dumps(body), headers)
        return client

    def complete(self, **fields: Any) -> http.client.HTTPConnection:
        return self.send("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, **fields})

    def health(self) -> tuple[int, Any]:
        answer = self.send("GET", "/health").getresponse()
        return answer.status, json.load(answer)

    def until_step_is(self, seconds: float) -> Any:
        """What a healthy server says of itself when its step is so old."""
        found: dict[str, Any] = {}
        while (found.get("step_age") or 0.0) < seconds:
            status, found = self.health()
            assert status == 200, found
            time.sleep(0.02)
        return found

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors


@contextmanager
def server(where: str, slow_seconds: float = 1.0, **options: Any) -> Iterator[Running]:
    command = [sys.executable, "-m", "tests.support.server.serve_hanging", where, "0.5", "5"]
    config = {"api_key": ["hidden"], "admin_key": "hidden, too", **options}
    command += [json.dumps(config), str(slow_seconds)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        found = re.search(r"is ready on http://127.0.0.1:(\d+) ", process.stdout.readline())
        assert found
        yield Running(process, int(found[1]), stack)


def test_a_step_that_never_ends(tmp_path: Path) -> None:
    """Before the limit all is well; then requests end with an error, and the process with 70."""
    with server("step", stall_seconds=1.5, crash_dir=str(tmp_path)) as running:
        whole, stream = running.complete(), running.complete(stream=True)
        found = running.until_step_is(0.2)
        assert (found["status"], found["step"], found["operation"]) == ("ok", 0, "wait")
        answer = whole.getresponse()
        assert (answer.status, json.load(answer)["error"]["code"]) == (503, "engine_dead")
        answer = stream.getresponse()
        assert (answer.status, b"engine_dead" in answer.read()) in [(503, True), (200, True)]
        code, errors = running.end()
    assert code == DEAD
    [line] = [line for line in errors.splitlines() if line.startswith("stalled: ")]
    assert re.match(r"stalled: step 0 has made no progress for \d s: submitted .* ago; ", line)
    assert "the executor is in 'wait'" in line
    assert re.search(r"requests 1 \(named\)", line)
    assert re.search(r"File \".*serve_hanging.py\", line \d+ in run", errors)
    [path] = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert report["cause"] in line
    assert "asyncllm-executor" in report["stacks"]
    assert {each["prompt_tokens"] for each in report["requests"]} == {1}
    assert report["names"] == {"1": "named", "2": "named"}
    assert "hidden" not in path.read_text()


def test_compiling_is_not_a_stall() -> None:
    with server("compile", slow_seconds=2.5, stall_seconds=0.4) as running:
        client = running.complete()
        found = running.until_step_is(0.8)  # twice as old as other steps may become
        assert (found["status"], found["operation"]) == ("ok", "compile")
        assert client.getresponse().status == 200
        assert running.health()[1]["status"] == "idle"
        running.process.terminate()
        code, errors = running.end()
    assert (code, "stalled" in errors) == (0, False)


def test_a_stopped_process_does_not_call_itself_stalled() -> None:
    stopped = GAP_SECONDS + 1.0
    # With the time that it was stopped, the step takes longer than it may; without, a third of it.
    with server("slow step", slow_seconds=stopped + 1.5, stall_seconds=stopped) as running:
        client = running.complete()
        running.until_step_is(1.0)  # the watchdog has seen it
        running.process.send_signal(signal.SIGSTOP)
        time.sleep(stopped)
        running.process.send_signal(signal.SIGCONT)
        assert running.health()[0] == 200
        assert client.getresponse().status == 200
        running.process.terminate()
        code, errors = running.end()
    assert (code, "stalled" in errors) == (0, False)


def test_an_event_loop_that_does_not_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"stall_seconds": 1.0, "crash_dir": str(tmp_path)}
    with server("spinning loop", **options) as running:
        code, errors = running.end()
    assert code == DEAD
    pattern = r"stalled: the event loop has not run for \d s: it is at serve_hanging.py:\d+, _spin;"
    assert re.search(pattern, errors)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_executor_that_raises(tmp_path: Path) -> None:
    with server("raise", crash_dir=str(tmp_path)) as running:
        answer = running.complete().getresponse()
        assert (answer.status, json.load(answer)["error"]["code"]) == (503, "engine_dead")
        code, errors = running.end()
    assert code == DEAD
    assert "RuntimeError: planted" in errors
    [path] = tmp_path.iterdir()
    assert json.loads(path.read_text())["cause"] == "the executor died; its log has the cause"
