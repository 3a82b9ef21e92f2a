"""How late the event loop of a busy server is: many streams, and prompts of 100,000 tokens.

    python examples/bench_lag.py                                       # simulated 8B on an H200
    python examples/bench_lag.py --cores 0,1 --device cuda --model MODEL
    python examples/bench_lag.py --quick

All streams begin at the same moment, and end and begin again as they like. Meanwhile one long
prompt after the other is sent, and ``/health`` is asked for, each time over a new connection. With
``--cores`` the server has only these, and the clients have the others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from contextlib import suppress
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from asyncllm.config import EngineConfig
from asyncllm.lab.bench.server import ServerProcess, fetch, scrape
from asyncllm.lab.bench.stream import Connection

HEALTH_SECONDS = 0.05


def request_of(max_tokens: int) -> bytes:
    body = (
        f'{{"prompt": "{"hello there " * 20}", "max_tokens": {max_tokens}, "ignore_eos": true,'
        ' "stream": true}'
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def stream(port: int, max_tokens: int, until: float) -> int:
    """One stream after the other; returns how many."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
    count = 0
    while time.perf_counter() < until:
        await connection.send(request_of(max_tokens))
        count += 1
    connection.close()
    return count


def send_long(url: str, tokens: int) -> float:
    """Send a prompt of about that many tokens, which may be too long; returns seconds."""
    words = " ".join("".join(random.choices("abcdefghijklmnop", k=3)) for _ in range(tokens // 3))
    body = f'{{"prompt": "{words}", "max_tokens": 2}}'.encode()
    began = time.perf_counter()
    with suppress(HTTPError):  # it was tokenized to find that out
        headers = {"Content-Type": "application/json"}
        urlopen(Request(f"{url}/v1/completions", body, headers), timeout=120).read()
    return time.perf_counter() - began


async def long_prompts(url: str, tokens: int, until: float) -> list[float]:
    seconds = []
    while time.perf_counter() < until:
        seconds.append(await asyncio.to_thread(send_long, url, tokens))
        await asyncio.sleep(1.0)
    return seconds


async def probes(url: str, until: float) -> list[float]:
    seconds = []
    while time.perf_counter() < until:
        began = time.perf_counter()
        await asyncio.to_thread(fetch, f"{url}/health")
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(HEALTH_SECONDS)
    return sorted(seconds)


async def run(url: str, options: argparse.Namespace) -> None:
    port, until = int(url.rpartition(":")[2]), time.perf_counter() + options.seconds
    before = scrape(url)
    streams = (stream(port, options.max_tokens + i % 97, until) for i in range(options.streams))
    health, long, counts = await asyncio.gather(
        probes(url, until), long_prompts(url, options.long, until), asyncio.gather(*streams)
    )
    now = scrape(url)
    grown = now["asyncllm_generation_tokens_total"] - before["asyncllm_generation_tokens_total"]
    lag, late = now["asyncllm_event_loop_lag_p99_seconds"], now["asyncllm_result_lag_p99_seconds"]
    print(f"{options.streams} streams: {sum(counts)} answers, {grown:.0f} tokens")
    print(f"{len(long)} prompts of {options.long} tokens: {1e3 * max(long):.0f} ms at most")
    print(f"loop lag p99 {1e3 * lag:.1f} ms, result lag p99 {1e3 * late:.1f} ms")
    p99 = health[int(0.99 * (len(health) - 1))]
    print(f"/health p99 {1e3 * p99:.1f} ms, at most {1e3 * health[-1]:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=400, help="of a stream; up to 96 more")
    parser.add_argument("--long", type=int, default=100_000, help="tokens of a long prompt")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--cores", help="of the server, as in 0,1")
    parser.add_argument("--device", default="sim")
    parser.add_argument("--model", help="folder or hub id; by default the demo's")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.seconds, options.long = 8, 1.0, 2_000
    config = EngineConfig(
        model=options.model,
        device=options.device,
        sim_profile="h200-8b",
        load_format=options.load_format,
        max_num_seqs=256,
    )
    everywhere = os.sched_getaffinity(0)
    own = set(map(int, options.cores.split(","))) if options.cores else everywhere
    os.sched_setaffinity(0, own)  # the server inherits it
    with ServerProcess(config) as server:
        os.sched_setaffinity(0, everywhere - own or everywhere)
        asyncio.run(run(server.url, options))


if __name__ == "__main__":
    main()
