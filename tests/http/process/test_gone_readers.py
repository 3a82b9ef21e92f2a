"""Servers whose stdout or stderr nobody reads any more, or never did."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.http.process.test_supervise import children, own_session, until
from tests.support.server.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")

NOWHERE = subprocess.DEVNULL


@contextmanager
def serving(
    port: int, *options: str, redirect: str = "", stdout: int = NOWHERE, stderr: int = NOWHERE
) -> Iterator[subprocess.Popen[bytes]]:
    """``asyncllm serve``."""
    command = [sys.executable, "-m", "asyncllm", "serve", "--device", "sim", "--port", str(port)]
    shell = ["sh", "-c", f'exec "$@" {redirect}', "sh"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    files = {"stdout": stdout, "stderr": stderr}
    with own_session(*shell, *command, *options, **files, env=environment) as process:
        yield process


def is_ready(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False


def until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    def ready() -> bool:
        assert process.poll() is None, f"it has ended with {process.returncode}"
        return is_ready(port)

    until(ready)


def end(server: int) -> None:
    """Kill it, and wait until it is gone."""
    os.kill(server, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{server}"))


@pytest.mark.parametrize("standby", ["--standby", "--no-standby"])
@pytest.mark.parametrize("gone", ["stdout", "stderr"])
def test_it_is_started_again_and_again(gone: str, standby: str) -> None:
    port = free_port()
    read, write = os.pipe()
    stdout, stderr = (write, NOWHERE) if gone == "stdout" else (NOWHERE, write)
    with serving(port, standby, stdout=stdout, stderr=stderr) as process:
        os.close(write)
        until_ready(process, port)
        if gone == "stdout":
            assert b"is ready on" in os.read(read, 4096)
        os.close(read)
        for _ in range(2):
            end(children(process.pid)[0])
            until_ready(process, port)
            time.sleep(0.3)  # it goes on, also after it has said so
            assert is_ready(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, 120)  # 120: Python could not write its last words


@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_it_starts_with_closed_files(redirect: str) -> None:
    port = free_port()
    with serving(port, redirect=redirect) as process:
        until_ready(process, port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
