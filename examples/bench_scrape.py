"""What a scrape of /metrics costs the event loop: made anew, from the kept text, over HTTP.

    python examples/bench_scrape.py [--quick]

The real server around a simulated device that has answered some requests, so that every histogram
has its samples. A scrape over HTTP is measured as CPU time of the loop's thread, on a connection
that is kept open as gateways do, less what the idle loop takes anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.config.server_config import ServerConfig
from asyncllm.server.app import create_app
from asyncllm.server.http.listener import Listener
from asyncllm.server.metrics.scrape import PAGE
from asyncllm.supervise.listening import bind
from asyncllm.system.event_loop import new_event_loop

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


async def read_answers(port: int, count: int) -> None:
    """The client, in a process of its own: one scrape after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        writer.write(REQUEST)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        await reader.readexactly(length)
    writer.close()


async def cpu_of_client(port: int, count: int) -> float:
    """CPU seconds of this thread while a client scrapes ``count`` times."""
    command = [sys.executable, __file__, "--read", str(port), "--count", str(count)]
    client = await asyncio.create_subprocess_exec(*command)
    started = time.thread_time()
    await client.wait()
    return time.thread_time() - started


async def measure(count: int, config: ServerConfig) -> None:
    async with AsyncLLM(device="sim") as llm:
        prompt, params = "Count to ten.", SamplingParams(max_tokens=20)
        await asyncio.gather(*(llm.generate(prompt, params) for _ in range(50)))
        app = create_app(llm, config)
        listener = Listener(app, request_seconds=60, close_seconds=0.1)
        await listener.start(bind("127.0.0.1", 0))
        try:
            page = app[PAGE]
            started = time.thread_time()
            for _ in range(count):
                text = page.write()
            made = (time.thread_time() - started) / count
            port = listener.address[1]
            few, many = count // 10, count
            over_http = await cpu_of_client(port, many) - await cpu_of_client(port, few)
            print(f"{len(text.encode()) / 1024:.0f} KiB, {text.count(chr(10))} lines")
            print(f"made anew, at most ten times a second: {1e3 * made:.2f} ms")
            print(f"a scrape over HTTP, CPU of the loop:   {1e3 * over_http / (many - few):.3f} ms")
        finally:
            await listener.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=3000, help="scrapes")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    parser.add_argument("--read", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    count = 100 if options.quick else options.count
    if options.read:
        asyncio.run(read_answers(options.read, count))
        return
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(measure(count, ServerConfig(metrics_compat="vllm")))


if __name__ == "__main__":
    main()
