"""How long a server that is killed takes until it gives tokens again.

    python examples/bench_restart.py [--runs N] [MODEL AND OPTIONS OF serve ...]

Starts ``asyncllm serve``, kills the serving process with SIGKILL, N times, and sends a request
again and again until it is answered with a token. Prints the seconds from the kill to that token,
and the memory of the supervising process. The files of the model are in
the system's page cache by then. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

#: Between two attempts.
RETRY_SECONDS = 0.02


def first_token(url: str) -> None:
    """Return when a request has got its first token, however often it has to be sent."""
    body = {"prompt": "Once upon a time", "max_tokens": 2, "stream": True, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    while True:
        with (
            suppress(URLError, ConnectionError),
            urlopen(request, timeout=300) as stream,
        ):
            if any(line.startswith(b"data: {") for line in stream):
                return
        time.sleep(RETRY_SECONDS)


def wait_until_ready(server: subprocess.Popen[str]) -> str:
    """The URL, when the server says that it is ready."""
    assert server.stdout is not None
    for line in server.stdout:
        if " is ready on " in line:
            return line.split(" is ready on ")[1].split()[0]
    raise SystemExit("the server ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="how often it is killed")
    args, options = parser.parse_known_args()
    command = [sys.executable, "-m", "asyncllm", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = wait_until_ready(server)
            first_token(url)
            print("seconds from the kill to the first token")
            for _ in range(args.runs):
                children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
                killed = time.perf_counter()
                os.kill(int(children), signal.SIGKILL)
                first_token(url)
                print(f"{time.perf_counter() - killed:6.2f}", flush=True)
            status = Path(f"/proc/{server.pid}/status").read_text()
            rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
            print("supervising process:", " ".join(rss.split()))
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
