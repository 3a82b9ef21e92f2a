"""The server process ends in time, whatever hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DRAIN, GRACE = 0.5, 1.5
#: For a process that has to end to be noticed, on a busy machine.
MARGIN = 3.0


@contextmanager
def server(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def hanging(where: str) -> Iterator[subprocess.Popen[str]]:
    with server("tests.support.server.serve_hanging", where, str(DRAIN), str(GRACE)) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith(("asyncllm is ready on", "loading")), line
        running.line = line  # type: ignore[attr-defined]
        yield running


def end(running: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Exit code and stderr of a process that must end within so many seconds."""
    _, errors = running.communicate(timeout=seconds)
    return running.returncode, errors


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("loading", r"asyncllm-executor \(serve_hanging.py:\d+, build\)"),
        ("loop", r"asyncllm-loop \("),
        ("spinning loop", r"asyncllm-loop \(serve_hanging.py:\d+, _spin\)"),
        ("thread pool", r"(uvloop|asyncio)_\d \(thread.py"),
        ("thread", r"straggler \("),
        ("exit", "the interpreter"),
        ("closing", r"asyncllm-loop \("),
    ],
)
def test_a_hanging_thread_is_named_and_left(where: str, named: str) -> None:
    with hanging(where) as running:
        if "loop" in where:
            assert running.stdout is not None
            assert running.stdout.readline() == "hanging\n"
        running.terminate()
        code, errors = end(running, DRAIN + GRACE + MARGIN)
    assert code == 1
    [line] = [line for line in errors.splitlines() if "not waiting any longer for" in line]
    assert re.search(named, line)
    assert "Traceback" not in errors


def test_the_kernel_ends_a_process_that_python_cannot() -> None:
    with hanging("interpreter's lock") as running:
        running.terminate()
        code, _ = end(running, DRAIN + GRACE + MARGIN)
    assert code == -signal.SIGALRM


def test_a_download_is_not_waited_for() -> None:
    with hanging("download") as running:
        running.terminate()
        assert end(running, GRACE + MARGIN) == (0, "")


def test_a_step_that_hangs() -> None:
    """Its request is cut off with an answer, and then the process ends."""
    with hanging("step") as running:
        port = int(re.search(r":(\d+) ", running.line)[1])  # type: ignore[attr-defined,index]
        body = json.dumps({"prompt": "a", "max_tokens": 5}).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            time.sleep(0.3)
            running.terminate()
            assert client.recv(100).startswith(b"HTTP/1.1 503")
            code, errors = end(running, DRAIN + GRACE + MARGIN)
    assert code == 1
    assert "cutting 1 requests off" in errors
    assert re.search(r"asyncllm-executor \(serve_hanging.py:\d+, run\)", errors)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_while_loading_ends_it_at_once(number: signal.Signals) -> None:
    with server("tests.support.server.serve_hanging", "loading", "60", "60") as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "loading\n"
        running.send_signal(number)
        time.sleep(0.3)
        assert running.poll() is None
        running.send_signal(number)
        code, errors = end(running, MARGIN)
    assert code == 1
    assert "not waiting any longer for: " in errors


def test_the_real_program_when_its_loop_hangs(tmp_path: Path) -> None:
    """Opening a pipe that nobody reads from takes for ever, and the trace is opened by the loop."""
    trace = tmp_path / "trace"
    os.mkfifo(trace)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = ("asyncllm", "serve", "--device", "cpu", "--port", str(port), "--trace", str(trace))
    with server(*command, "--drain-seconds", "0") as running:
        wait_until_deaf(port)
        assert running.poll() is None
        running.terminate()
        started = time.monotonic()
        code, errors = end(running, 5 + MARGIN)
        assert time.monotonic() - started > 3
    assert code == 1
    assert "not waiting any longer for: asyncllm-loop (" in errors


def wait_until_deaf(port: int) -> None:
    """Return when a server that has answered no longer does."""
    has_answered = False
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                has_answered = client.recv(100).startswith(b"HTTP/1.1 200") or has_answered
        except TimeoutError:
            if has_answered:
                return
        except ConnectionRefusedError:
            pass
        time.sleep(0.1)
    raise AssertionError("the loop does not hang")
