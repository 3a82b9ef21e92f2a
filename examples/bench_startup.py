"""How long ``asyncllm serve`` takes from the command to the first token.

    python examples/bench_startup.py MODEL [--runs N] [OPTION OF serve ...]

Starts a server N times with an empty kernel cache (each time a new one) and N times with a full
one, and prints for each start: seconds to the line that says it is ready, to the first token of a
request sent then, and the phases of the start-up bill. The first start reads files from the disk;
the table shows it like any other. Needs a GPU, as only there kernels are compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple
from urllib.request import Request, urlopen

_PHASE = re.compile(r"^(\S.*?) +(\d+\.\d+) s +\d+\.\d+ GiB$")
_URL = re.compile(r"http://\S+")


class Start(NamedTuple):
    """One start: seconds since the command until ready, until the first token, and by phase."""

    ready: float
    first_token: float
    phases: dict[str, float]


def measure(model: str, cache: str, options: list[str]) -> Start:
    """Start a server, send it one request, and stop it."""
    command = [sys.executable, "-m", "asyncllm", "serve", model, "--kernel-cache", cache]
    command += ["--port", "0", "--log-level", "info", *options]
    # With bytecode, as pip installs it; the first start writes what is missing.
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    with subprocess.Popen(
        command, env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        logged: list[str] = []
        reader = threading.Thread(target=logged.extend, args=(server.stderr,))
        reader.start()
        try:
            line = server.stdout.readline()
            ready = time.perf_counter() - begin
            url = _URL.search(line)
            if url is None:
                server.kill()
                reader.join()
                raise SystemExit("the server did not start:\n" + "".join(logged))
            wait_for_token(url.group())
            first_token = time.perf_counter() - begin
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
            reader.join()
    found = (_PHASE.match(line.rstrip()) for line in logged)
    return Start(ready, first_token, {m[1]: float(m[2]) for m in found if m})


def wait_for_token(url: str) -> None:
    """Send a request, and return when the first token of its stream is there."""
    body = {"prompt": "Once upon a time", "max_tokens": 2, "stream": True, "temperature": 0}
    request = Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=300) as stream:
        for line in stream:
            if line.startswith(b"data:"):
                return
    raise SystemExit("the stream ended without a token")


def table(name: str, starts: Iterable[Start]) -> str:
    """A line for each start."""
    lines = [f"{name}: seconds to ready | to the first token | phases"]
    for start in starts:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in start.phases.items())
        lines.append(f"  {start.ready:6.2f} | {start.first_token:6.2f} | {phases}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="starts of each kind")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        caches = [f"{folder}/{run}" for run in range(args.runs)]
        empty = [measure(args.model, cache, options) for cache in caches]
        print(table("empty kernel cache", empty), flush=True)
        full = [measure(args.model, caches[0], options) for _ in caches]
    print(table("full kernel cache", full))


if __name__ == "__main__":
    main()
