"""How long clients wait when very many connect at once.

    python examples/bench_connect.py                  # 1,000 streams, about 20 s
    python examples/bench_connect.py --count 100
    python examples/bench_connect.py --tree ../other  # the server of another checkout

Starts ``asyncllm serve --device sim``, opens all streams at the same moment from this process, over
plain sockets, and meanwhile asks for ``/health`` every 50 ms and once for ``/metrics``, each over a
connection of its own. The client parses next to nothing. Its share of a core is printed: if that is
high, the figures are the client's and not the server's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Runs the command line with asyncio's own event loop.
WITHOUT_UVLOOP: Final = (
    "import sys; sys.modules['uvloop'] = None; "
    "from asyncllm.__main__ import main; sys.exit(main(sys.argv[1:]))"
)
HEALTH_SECONDS: Final = 0.05
TIMEOUT_SECONDS: Final = 60.0
#: When the metrics are read during the storm.
SCRAPE_AT: Final = 0.1
LAG: Final = re.compile(
    r"^asyncllm_((?:event_loop_lag|accept_wait|start_wait)_(?:p99|last|max)_seconds) (\S+)$", re.M
)
FIRST_TOKEN: Final = re.compile(rb'"delta":\{"content":"[^"]')


@dataclass
class Exchange:
    """One request on a connection of its own; times count from the beginning of the round."""

    request: bytes
    wants: Callable[[bytes], bool]
    sent_at: float = 0.0
    first_at: float | None = None
    ended: bool = False
    answer: bytes = b""

    def take(self, part: bytes, now: float) -> None:
        self.answer += part
        if self.first_at is None and self.wants(self.answer):
            self.first_at = now

    @property
    def waited(self) -> float:
        assert self.first_at is not None, self.answer[:200]
        return self.first_at - self.sent_at


class Client:
    """All sockets of a round on one selector."""

    def __init__(self, port: int):
        self._port = port
        self._selector = selectors.DefaultSelector()
        self.began = time.perf_counter()
        self.open = 0

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    def start(self, exchange: Exchange) -> Exchange:
        connection = socket.socket()
        connection.setblocking(False)
        exchange.sent_at = self.now
        connection.connect_ex(("127.0.0.1", self._port))
        self._selector.register(connection, selectors.EVENT_WRITE, exchange)
        self.open += 1
        return exchange

    def turn(self, seconds: float) -> None:
        for key, events in self._selector.select(seconds):
            connection, exchange = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            if events & selectors.EVENT_WRITE:
                connection.sendall(exchange.request)
                self._selector.modify(connection, selectors.EVENT_READ, exchange)
                continue
            part = connection.recv(1 << 16)
            exchange.take(part, self.now)
            if not part:
                exchange.ended = True
                self._selector.unregister(connection)
                connection.close()
                self.open -= 1


def get(path: str) -> Exchange:
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    return Exchange(request, lambda answer: bool(answer))


def chat(number: float, max_tokens: int) -> Exchange:
    text = f"Tell the story of the sailor with the number {number}. " + "It should be long."
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return Exchange(head.encode() + body, lambda answer: FIRST_TOKEN.search(answer) is not None)


def storm(port: int, count: int, max_tokens: int) -> str:
    """One round; returns its line of figures."""
    salt = time.time()  # no prompt is cached
    loop_cpu = read_loop_cpu(port)
    requests = [chat(number + salt, max_tokens) for number in range(count)]
    cpu = time.process_time()
    client = Client(port)
    streams = [client.start(request) for request in requests]
    health: list[Exchange] = []
    scrape: Exchange | None = None
    while client.open:
        is_over = all(stream.ended for stream in streams)
        if client.now > HEALTH_SECONDS * len(health) and not is_over:
            health.append(client.start(get("/health")))
        if scrape is None and client.now > SCRAPE_AT:
            scrape = client.start(get("/metrics"))
        client.turn(HEALTH_SECONDS / 2)
        if client.now > TIMEOUT_SECONDS:
            raise SystemExit(f"the streams have not ended within {TIMEOUT_SECONDS:g} s")
    share = (time.process_time() - cpu) / client.now
    loop_cpu = read_loop_cpu(port) - loop_cpu
    failed = sum(stream.first_at is None for stream in streams)
    waits = sorted(stream.waited for stream in streams if stream.first_at is not None)
    asked = [ask.waited for ask in health]
    seen = "the streams ended before it was asked"
    if scrape is not None:
        lags = LAG.findall(scrape.answer.decode())
        seen = f"answered after {scrape.waited:.3f} s: "
        seen += ", ".join(f"{name} {float(value):.3f}" for name, value in lags)
    return (
        f"TTFT p50 {percentile(waits, 50):.2f} s, p99 {percentile(waits, 99):.2f} s; "
        f"/health worst {max(asked):.3f} s of {len(asked)}; all done after {client.now:.1f} s; "
        f"{failed} failed; this client took {share:.0%} of a core, and the server's loop "
        f"{loop_cpu / count * 1000:.2f} ms of CPU per stream\n"
        f"    /metrics, asked at {SCRAPE_AT} s, {seen}"
    )


def read_loop_cpu(port: int) -> float:
    """CPU seconds of the server's event loop so far: a figure that other load leaves alone."""
    client = Client(port)
    scrape = client.start(get("/metrics"))
    while not scrape.ended:
        client.turn(1.0)
    found = re.search(rb"^asyncllm_event_loop_cpu_seconds_total (\S+)$", scrape.answer, re.M)
    return 0.0 if found is None else float(found[1])


def percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="streams at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tree", help="folder with another asyncllm package to serve with")
    parser.add_argument("--no-uvloop", action="store_true", help="serve with asyncio's own loop")
    args = parser.parse_args()
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # also the server's

    how = ["-c", WITHOUT_UVLOOP] if args.no_uvloop else ["-m", "asyncllm"]
    options = ["--device", "sim", "--sim-profile", "h200-0.6b", "--port", "0"]
    options += ["--max-num-seqs", str(max(256, args.count))]
    environment = {**os.environ, "PYTHONPATH": args.tree} if args.tree else None
    command = [sys.executable, *how, "serve", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=args.tree
    ) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"ready on http://\S+:(\d+)", server.stdout.readline())
            if found is None:
                raise SystemExit("the server did not start")
            port = int(found[1])
            print(f"a first stream: {storm(port, 1, args.max_tokens)}", flush=True)
            for number in range(args.rounds):
                print(f"{args.count} at once, round {number + 1} of {args.rounds}: ", flush=True)
                print(f"    {storm(port, args.count, args.max_tokens)}", flush=True)
        finally:
            server.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
