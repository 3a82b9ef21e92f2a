"""A station in a process of its own, as if it were on another machine: reached over loopback."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil  # type: ignore[import-untyped]

from asyncllm.executor.team.station import run_station
from asyncllm.executor.team.station_messages import Machines
from asyncllm.system.child_process import die_with
from asyncllm.wire.tcp import TOKEN_BYTES, listen

HOST = "127.0.0.1"


class StationProcess:
    """One station; ``process`` and the ranks below it are left alone when this ends."""

    def __init__(self, token: bytes):
        self._popen = subprocess.Popen(
            [sys.executable, "-m", __name__, token.hex(), str(psutil.Process().pid)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._popen.stdout is not None
        self.address = HOST, int(self._popen.stdout.readline())
        self.process = psutil.Process(self._popen.pid)

    def ranks(self) -> list[psutil.Process]:
        found: list[psutil.Process] = self.process.children()
        return found

    def wait(self, seconds: float) -> int:
        """Its exit code."""
        return self._popen.wait(seconds)

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        assert self._popen.stdout is not None
        self._popen.stdout.close()


@contextmanager
def stations(count: int = 1) -> Iterator[tuple[Machines, list[StationProcess]]]:
    """What rank 0 takes to have ranks in as many stations."""
    token = secrets.token_bytes(TOKEN_BYTES)
    started = [StationProcess(token) for _ in range(count)]
    try:
        yield Machines(HOST, tuple(one.address for one in started), token), started
    finally:
        for one in started:
            one.close()


def main(token: str, parent: str) -> None:
    die_with(int(parent))
    listening = listen(HOST)
    print(listening.getsockname()[1], flush=True)
    run_station(listening, bytes.fromhex(token))


if __name__ == "__main__":
    main(*sys.argv[1:])
