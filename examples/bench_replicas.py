"""What replicas behind one port cost and keep: prefix hits of chats, and streams past the front.

    python examples/bench_replicas.py hits       # about a minute
    python examples/bench_replicas.py streams

``hits`` holds chats of several turns over a pool of connections, any turn on any connection, with
one replica and with several, and prints which share of the prompts' tokens was cached.

``streams`` opens streams at once, directly and through a relay that only copies bytes, which is the
least that a proxy does, and prints what the processor did meanwhile and how long tokens took. All
run ``asyncllm serve --device sim``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import uvloop

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEM: Final = "You are a helpful assistant. Answer briefly and truthfully. " * 8
WORDS: Final = ("river", "stone", "light", "seven", "paper", "green", "music", "window", "salt")


@contextmanager
def served(replicas: int, options: list[str]) -> Iterator[tuple[str, list[int]]]:
    """The URL, and the process ids: the front's or the parent's first."""
    command = [sys.executable, "-m", "asyncllm", "serve", "--device", "sim", "--port", "0"]
    command += ["--dp", str(replicas), "--log-level", "error", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"ready on (\S+)", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line!r}")
        pid = process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        try:
            yield found[1], [pid, *map(int, children)]
        finally:
            process.send_signal(signal.SIGTERM)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- prefix hits -------------------------------------------------------------------------------


async def talk(session: aiohttp.ClientSession, url: str, seed: int, turns: int) -> None:
    rng = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for _ in range(turns):
        question = " ".join(rng.choices(WORDS, k=rng.randint(5, 60)))
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": rng.randint(10, 60), "ignore_eos": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            found = await answer.json()
        messages.append(found["choices"][0]["message"] | {"role": "assistant"})
        await asyncio.sleep(rng.random() * 0.2)


async def measure_hits(url: str, chats: int, turns: int, connections: int) -> float:
    """The share of the prompts' tokens that was cached."""
    pool = aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(connector=pool) as session:
        await asyncio.gather(*(talk(session, url, seed, turns) for seed in range(chats)))
        async with session.get(f"{url}/metrics") as answer:
            page = await answer.text()
    return total(page, "cached_prompt_tokens") / total(page, "admitted_prompt_tokens")


def total(page: str, name: str) -> float:
    """A counter of a page of metrics, over its labels."""
    found = re.findall(rf"^asyncllm_{name}_total(?:{{.*}})? (\S+)$", page, re.M)
    return sum(map(float, found))


def hits(args: argparse.Namespace) -> None:
    shares = {}
    for replicas in (1, *args.replicas):
        with served(replicas, ["--kv-cache-tokens", "200000"]) as (url, _):
            shares[replicas] = asyncio.run(
                measure_hits(url, args.chats, args.turns, args.connections)
            )
        share = shares[replicas]
        print(
            f"{replicas} replicas: {share:6.1%} of the prompts' tokens cached, "
            f"{share / shares[1]:6.1%} of one replica's",
            flush=True,
        )


# -- streams -----------------------------------------------------------------------------------


class Copy(asyncio.Protocol):
    """One direction of a relayed connection."""

    def __init__(self) -> None:
        self.other: asyncio.WriteTransport | None = None
        self.early = b""

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early += data
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


class Relay(Copy):
    """A client's connection: opens one to the server, and copies both ways."""

    def __init__(self, host: str, port: int):
        super().__init__()
        self._server = (host, port)

    def connection_made(self, transport: Any) -> None:
        self._task = asyncio.ensure_future(self._connect(transport))

    async def _connect(self, client: Any) -> None:
        loop = asyncio.get_running_loop()
        server, back = await loop.create_connection(Copy, *self._server)
        back.other, self.other = client, server
        server.write(self.early)


async def run_relay(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Relay(host, port), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def relayed(url: str) -> Iterator[tuple[str, int]]:
    """The URL of a relay to the server, and its process id."""
    host, _, port = url.removeprefix("http://").partition(":")
    command = [sys.executable, __file__, "relay", host, port]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()


async def stream(session: aiohttp.ClientSession, url: str, tokens: int, gaps: list[float]) -> None:
    body = {
        "prompt": f"{random.random()}",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        last = time.perf_counter()
        async for _ in answer.content.iter_any():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now


async def measure_streams(url: str, count: int, tokens: int) -> tuple[float, list[float]]:
    gaps: list[float] = []
    pool = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=pool) as session:
        began = time.perf_counter()
        await asyncio.gather(*(stream(session, url, tokens, gaps) for _ in range(count)))
        return time.perf_counter() - began, gaps


def streams(args: argparse.Namespace) -> None:
    profile = ["--sim-profile", args.profile, "--max-model-len", "4096"]
    with served(2, profile) as (url, pids), relayed(url) as (relay_url, relay):
        for name, to, pid in (("sockets", url, pids[0]), ("relay", relay_url, relay)):
            before = cpu_seconds(pid)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                seconds, gaps = runner.run(measure_streams(to, args.count, args.tokens))
            used = cpu_seconds(pid) - before
            total = args.count * args.tokens
            p99 = statistics.quantiles(gaps, n=100)[98]
            print(
                f"{name:8} {total / seconds:7.0f} tok/s, {used * 1e6 / total:6.2f} us of processor "
                f"a token in the {'front' if pid == pids[0] else 'relay'} ({used / seconds:4.0%} "
                f"of a core), gap between two reads p50 {statistics.median(gaps) * 1e3:.1f} ms, "
                f"p99 {p99 * 1e3:.1f} ms",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("hits")
    one.add_argument("--chats", type=int, default=48)
    one.add_argument("--turns", type=int, default=6)
    one.add_argument("--connections", type=int, default=24)
    one.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    one.set_defaults(run=hits)
    two = kinds.add_parser("streams")
    two.add_argument("--count", type=int, default=64)
    two.add_argument("--tokens", type=int, default=300)
    two.add_argument("--profile", default="h200-0.6b")
    two.set_defaults(run=streams)
    three = kinds.add_parser("relay")
    three.add_argument("host")
    three.add_argument("port", type=int)
    three.set_defaults(run=None)
    args = parser.parse_args()
    if args.kind == "relay":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_relay(args.host, args.port))
    else:
        args.run(args)


if __name__ == "__main__":
    main()
