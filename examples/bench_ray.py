"""What a streamed chunk costs behind Ray Serve: CPU time of each process, and of a server alone.

    python examples/bench_ray.py                  # about a minute
    python examples/bench_ray.py --ways haproxy

The device is simulated, so hardly any of it is the model's. Needs the extras ray and test.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import aiohttp
import psutil  # type: ignore[import-untyped]

SERVE = [sys.executable, "-m", "asyncllm", "serve", "--device", "sim", "--port", "0"]
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "alone": (["--no-supervise"], {}),
    "ray": (["--ray"], {}),
    "haproxy": (["--ray"], {"RAY_SERVE_ENABLE_HA_PROXY": "1"}),
}
NAMES = {"Proxy": "proxy", "Front": "front", "Replica:": "replica", "haproxy": "HAProxy"}


def cpu_seconds(root: int) -> Counter[str]:
    """Of a process and its descendants, by what they are."""
    found: Counter[str] = Counter()
    process = psutil.Process(root)
    for each in [process, *process.children(recursive=True)]:
        try:
            title, times = " ".join(each.cmdline()), each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        kinds = (kind for part, kind in NAMES.items() if part in title)
        kind = next(kinds, "server" if "asyncllm serve" in title else "the rest of Ray")
        found[kind] += times.user + times.system
    return found


async def stream(session: aiohttp.ClientSession, url: str, tokens: int) -> int:
    """How many chunks an answer came in."""
    body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        return sum([line.startswith(b"data: {") async for line in response.content])


async def load(url: str, streams: int, tokens: int) -> int:
    async with aiohttp.ClientSession() as session:
        return sum(await asyncio.gather(*(stream(session, url, tokens) for _ in range(streams))))


def measure(way: str, streams: int, tokens: int) -> None:
    options, env = WAYS[way]
    variables = {**os.environ, "RAY_ADDRESS": "local", **env}
    with subprocess.Popen(
        [*SERVE, *options], stdout=subprocess.PIPE, text=True, env=variables
    ) as p:
        assert p.stdout is not None
        url = next(found[1] for line in p.stdout if (found := re.search(r"ready on (\S+)", line)))
        asyncio.run(load(url, streams, 16))  # what is compiled or connected first
        before = cpu_seconds(p.pid)
        chunks = asyncio.run(load(url, streams, tokens))
        spent = cpu_seconds(p.pid) - before
        p.send_signal(signal.SIGINT)
    each = {kind: round(seconds / chunks * 1e6) for kind, seconds in spent.most_common()}
    parts = ", ".join(f"{kind} {micros}" for kind, micros in each.items() if micros)
    print(f"{way}: {sum(each.values())} us of CPU time for each of {chunks} chunks ({parts})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    for way in args.ways:
        measure(way, args.streams, args.tokens)


if __name__ == "__main__":
    main()
