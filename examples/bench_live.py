"""What the page's live view costs a busy server: tokens per second, and CPU time of a token.

    python examples/bench_live.py [--streams 256] [--waiting 0] [--rounds 20] [--quick]

A server of the simulated device, with the step times of 8B on an H200. All streams run from the
beginning to the end; in every second stretch of time, one client asks for /live once a second, as
an open page does. Both kinds of stretches take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import NamedTuple

from asyncllm.config import EngineConfig
from asyncllm.lab.bench.scrape import scrape
from asyncllm.lab.bench.server import ServerProcess, fetch
from asyncllm.lab.bench.stream import Connection

CPU, TOKENS = "asyncllm_event_loop_cpu_seconds_total", "asyncllm_generation_tokens_total"
PERIOD = 1.0


class Stretch(NamedTuple):
    tokens_per_s: float
    cpu_us: float  # of the event loop's thread, for each token


async def stream(port: int) -> None:
    """One stream after the other, of 2,500 tokens."""
    body = '{"prompt": "Count.", "max_tokens": 2500, "ignore_eos": true, "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    while True:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        await connection.send((head + body).encode())


async def measure(url: str, seconds: float, *, watched: bool) -> tuple[Stretch, int]:
    """Also the bytes of an answer of /live, if it is watched."""
    loop, size = asyncio.get_running_loop(), 0
    before, started = await asyncio.to_thread(scrape, url), loop.time()
    while (left := started + seconds - loop.time()) > 0:
        if watched:
            size = len(await asyncio.to_thread(fetch, f"{url}/live"))
        await asyncio.sleep(min(PERIOD, left))
    after, took = await asyncio.to_thread(scrape, url), loop.time() - started
    tokens = after[TOKENS] - before[TOKENS]
    return Stretch(tokens / took, 1e6 * (after[CPU] - before[CPU]) / tokens), size


async def run(url: str, options: argparse.Namespace) -> None:
    port = int(url.rpartition(":")[2])
    count = options.streams + options.waiting
    streams = [asyncio.create_task(stream(port)) for _ in range(count)]
    while scrape(url)["asyncllm_requests_running"] < options.streams:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    await asyncio.sleep(1.0)
    found: dict[bool, list[Stretch]] = {False: [], True: []}
    size = 0
    for _ in range(options.rounds):
        for watched, stretches in found.items():
            stretch, size = await measure(url, options.seconds, watched=watched)
            stretches.append(stretch)
    print(f"{options.streams} streams, {options.waiting} more waiting, /live {size / 1024:.0f} KiB")
    for watched, stretches in found.items():
        rate = statistics.median(each.tokens_per_s for each in stretches)
        cpu = statistics.median(each.cpu_us for each in stretches)
        print(
            f"{'page open' if watched else 'no page':10} {rate:8.0f} tokens/s {cpu:7.2f} us/token"
        )
    pairs = zip(found[False], found[True], strict=True)
    ms = statistics.median(b.tokens_per_s * (b.cpu_us - a.cpu_us) / 1e3 for a, b in pairs)
    print(f"event loop: {ms:+.1f} ms of CPU time in each second (median)")
    for task in streams:
        task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=0, help="further streams, which wait")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each stretch")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of stretches")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.seconds, options.rounds = 8, 0.5, 1
    config = EngineConfig(device="sim", sim_profile="h200-8b", max_num_seqs=options.streams)
    with ServerProcess(config) as server:
        asyncio.run(run(server.url, options))


if __name__ == "__main__":
    main()
