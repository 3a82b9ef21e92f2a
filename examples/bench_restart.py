"""How long a server that is killed takes until it gives tokens again.

    python examples/bench_restart.py [--runs N] [MODEL AND OPTIONS OF serve ...]

Starts ``asyncllm serve``, kills the serving process with SIGKILL, N times, and sends a request
again and again until it is answered with a token. Prints the seconds from the kill until its parent
process knows that it is dead, until the new server is ready, and until that token; the size of the
new KV cache (smaller if the GPU still held what the old server had), and the memory of the parent.

With a standby (``--standby``, or on a GPU), each kill waits until it stands by. A server that has
not been ready for a minute is started again after 1, 2, 4... seconds from its second death on: this
delay is printed, and is part of the seconds. The files of the model are in the system's page cache
by then. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import Request, urlopen

#: Between two attempts.
RETRY_SECONDS = 0.02
#: A standby that is not there this long after the server is ready will not come.
STANDBY_SECONDS = 1.0


class Log:
    """What the processes write to stderr; it is passed on."""

    def __init__(self, server: subprocess.Popen[str]):
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, args=(server.stderr,))
        self._reader.start()

    def _read(self, stderr: IO[str]) -> None:
        for line in stderr:
            sys.stderr.write(line)
            self._lines.append((time.perf_counter(), line))

    def join(self) -> None:
        """Return when all is read of processes that have ended."""
        self._reader.join()

    def count(self, words: str) -> int:
        return sum(words in line for _, line in self._lines)

    def latest(self, words: str) -> float:
        """When a line with these words came last, by ``time.perf_counter``."""
        return max((at for at, line in self._lines if words in line), default=math.nan)

    def delay(self) -> str:
        """How long the supervising process waited before the latest start."""
        log = "".join(line for _, line in self._lines)
        said = re.findall(r"starting it again (now|in \d+ s)", log)
        return said[-1] if said else "?"


def children(parent: int) -> list[int]:
    """The oldest first: the server, and then its standby."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in text.split()]


def wait_for_standby(parent: int, log: Log, count: int) -> bool:
    """Return when the standby of this number waits; False if there is none."""
    end = time.monotonic() + STANDBY_SECONDS
    while len(children(parent)) < 2:
        if time.monotonic() > end:
            return False
        time.sleep(RETRY_SECONDS)
    while log.count("standing by after") < count and len(children(parent)) > 1:
        time.sleep(RETRY_SECONDS)
    return len(children(parent)) > 1


def first_token(url: str) -> None:
    """Return when a request has got its first token, however often it has to be sent."""
    body = {"prompt": "Once upon a time", "max_tokens": 2, "stream": True, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    while True:
        with suppress(URLError, ConnectionError), urlopen(request, timeout=300) as stream:
            if any(line.startswith(b"data: {") for line in stream):
                return
        time.sleep(RETRY_SECONDS)


def wait_until_ready(server: subprocess.Popen[str]) -> tuple[str, str]:
    """The URL, and the size of the KV cache, when the server says that it is ready."""
    assert server.stdout is not None
    for line in server.stdout:
        if " is ready on " in line:
            url = line.split(" is ready on ")[1].split()[0]
            return url, line[line.rindex("KV cache") :].rstrip(")\n")
    raise SystemExit("the server ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="how often it is killed")
    args, options = parser.parse_known_args()
    command = [sys.executable, "-m", "asyncllm", "serve", "--port", "0", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        log = Log(server)
        try:
            url, _ = wait_until_ready(server)
            first_token(url)
            print("seconds from the kill\n  dead  ready  first token")
            for run in range(args.runs):
                has_standby = wait_for_standby(server.pid, log, run + 1)
                killed = time.perf_counter()
                os.kill(children(server.pid)[0], signal.SIGKILL)
                first_token(url)
                answered = time.perf_counter()
                times = log.latest("the server has ended"), log.latest("start-up:"), answered
                dead, ready, token = (at - killed for at in times)
                by = "standby" if has_standby else "new process"
                _, cache = wait_until_ready(server)
                print(f"{dead:6.2f} {ready:6.2f} {token:12.2f}", end="  ")
                print(f"by a {by}, started {log.delay()}; {cache}", flush=True)
            status = Path(f"/proc/{server.pid}/status").read_text()
            rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
            print("supervising process:", " ".join(rss.split()))
        finally:
            server.terminate()
            server.wait(60)
            log.join()


if __name__ == "__main__":
    main()
