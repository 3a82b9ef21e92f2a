"""Whether a server keeps its size over very many requests.

    python examples/bench_soak.py                  # 100,000 requests
    python examples/bench_soak.py --quick          # 200
    python examples/bench_soak.py --count 20000 --device cuda --model Qwen/Qwen3-0.6B

Starts ``asyncllm serve`` with a small KV cache and sends it short requests over plain sockets:
whole answers, streams, streams that are left or aborted in the middle, clients that leave at once,
bad JSON, bad fields, bytes that are not HTTP, probes. Every now and then all of them pause, and the
server's memory, file descriptors, threads and KV pages are read. At the end: the growth for each
10,000 requests, of a line fitted to all but the first quarter of the readings.

``asyncllm_kv_books_healed_total`` and the pages held in between must be 0. Statistics of a bounded
size fill up during the first 100,000 requests or so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: Of 100 requests.
MIX: Final = {
    "whole": 52,
    "streamed": 12,
    "left in the middle": 10,
    "aborted": 4,
    "left at once": 10,
    "bad JSON": 4,
    "bad field": 4,
    "not HTTP": 2,
    "probe": 2,
}
CLIENTS: Final = 48
READINGS: Final = 16
SECONDS: Final = 60.0


@dataclass
class Reading:
    """The server between two bursts, when it has nothing to do."""

    requests: int
    rss_mib: float
    gpu_mib: float
    files: int
    threads: int
    pages_held: int
    pages_cached: int
    live: int
    healed: int


class Server:
    """``asyncllm serve`` in a process of its own, with what runs below it."""

    def __init__(self, options: list[str]):
        command = [sys.executable, "-m", "asyncllm", "serve", "--port", "0"]
        # A standby would grow while the first reading is taken.
        command += ["--no-standby", "--log-level", "error", "--kv-cache-tokens", "8192", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = re.search(r"ready on http://\S+:(\d+)", self._process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        self.port = int(found[1])

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(SECONDS)

    def processes(self) -> list[Path]:
        """Folders in /proc of the process and all below it."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
        found = [self._process.pid]
        for pid in found:  # which grows
            found += [child for child, parent in parents.items() if parent == pid]
        return [Path("/proc", str(pid)) for pid in found]

    async def read(self, requests: int) -> Reading:
        """Wait until nothing runs or waits, and measure."""
        end = time.monotonic() + SECONDS
        while True:
            await asyncio.sleep(0.3)  # metrics are kept for a while
            metrics = await self._metrics()
            busy = ("requests_running", "requests_waiting", "http_requests_live", "kv_pages_held")
            if not any(metrics[name] for name in busy) or time.monotonic() > end:
                break
        rss, threads, files, processes = 0.0, 0, 0, self.processes()
        for process in processes:
            status = (process / "status").read_text()
            rss += int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024
            threads += int(re.findall(r"Threads:\s+(\d+)", status)[0])
            files += len(list((process / "fd").iterdir()))
        return Reading(
            requests,
            rss,
            _gpu_mib({int(process.name) for process in processes}),
            files,
            threads,
            int(metrics["kv_pages_held"]),
            int(metrics["kv_pages_cached"]),
            int(metrics["http_requests_live"]),
            int(metrics["kv_books_healed_total"]),
        )

    async def _metrics(self) -> dict[str, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        found = re.findall(r"^asyncllm_(\w+) (\S+)", text, re.M)
        return {name: float(value) for name, value in found}


def _gpu_mib(pids: set[int]) -> float:
    """Memory of these processes on all GPUs; 0 without any."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    used = [line.split(", ") for line in lines if line.count(", ") == 1]
    return sum(float(mib) for pid, mib in used if int(pid) in pids and mib.isdigit())


class Client:
    """Sends one request after the other; its connection is kept where HTTP allows it."""

    def __init__(self, port: int, seed: int):
        self._port = port
        self._random = random.Random(seed)
        self._name = f"soak-{seed}"
        self._count = 0
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, kind: str) -> None:
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "whole": self._whole,
            "streamed": self._streamed,
            "left in the middle": self._left_in_the_middle,
            "aborted": self._aborted,
            "left at once": self._left_at_once,
            "bad JSON": lambda: self._refused(b'{"prompt": "a", '),
            "bad field": lambda: self._refused(b'{"prompt": "a", "max_tokens": -1}'),
            "not HTTP": self._not_http,
            "probe": self._probe,
        }
        self._count += 1
        async with asyncio.timeout(SECONDS):
            await actions[kind]()

    def close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    async def _whole(self) -> None:
        await self._write(self._body(max_tokens=2))
        assert await self._answer() == 200

    async def _streamed(self) -> None:
        reader = await self._write(self._body(max_tokens=3, stream=True))
        await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    async def _left_in_the_middle(self) -> None:
        reader = await self._write(self._body(max_tokens=200, stream=True))
        await reader.readuntil(b"data: ")
        self.close()

    async def _aborted(self) -> None:
        reader = await self._write(self._body(max_tokens=200, stream=True))
        await reader.readuntil(b"data: ")
        other = Client(self._port, 0)
        head = f"POST /v1/requests/{self._name}-{self._count}/abort HTTP/1.1\r\n"
        await other._write(b"", head)
        await other._answer()
        other.close()
        await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    async def _left_at_once(self) -> None:
        await self._write(self._body(max_tokens=200))
        self.close()

    async def _refused(self, body: bytes) -> None:
        await self._write(body)
        assert await self._answer() == 400

    async def _not_http(self) -> None:
        self.close()
        reader, writer = await self._open()
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        await reader.read()
        self.close()

    async def _probe(self) -> None:
        await self._write(b"", "GET /health HTTP/1.1\r\n")
        assert await self._answer() == 200

    def _body(self, **fields: object) -> bytes:
        words = [self._random.choice("abcdefgh") * 3 for _ in range(self._random.randint(1, 12))]
        salt = {"cache_salt": f"salt {self._random.randrange(1000)}"} if len(words) == 8 else {}
        body = {"prompt": " ".join(words), "ignore_eos": True, **salt, **fields}
        return json.dumps(body).encode()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._connection is None or self._connection[1].is_closing():
            self._connection = await asyncio.open_connection("127.0.0.1", self._port)
        return self._connection

    async def _write(
        self, body: bytes, head: str = "POST /v1/completions HTTP/1.1\r\n"
    ) -> asyncio.StreamReader:
        reader, writer = await self._open()
        head += f"Host: x\r\nX-Request-Id: {self._name}-{self._count}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return reader

    async def _answer(self) -> int:
        """Read a whole answer; returns its status."""
        reader, _ = await self._open()
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        [length] = re.findall(r"Content-Length: (\d+)", head)
        await reader.readexactly(int(length))
        if "connection: close" in head.lower():
            self.close()
        return int(head.split()[1])


async def burst(clients: list[Client], kinds: list[str], failures: list[str]) -> None:
    """Send requests of these kinds, each by the next client that is free."""
    waiting = iter(kinds)

    async def work(client: Client) -> None:
        for kind in waiting:
            try:
                await client.send(kind)
            except (AssertionError, OSError, EOFError, TimeoutError, ValueError) as error:
                failures.append(f"{kind}: {error!r}")
                client.close()

    await asyncio.gather(*map(work, clients))


def show(reading: Reading) -> None:
    cells = []
    for each, value in zip(fields(reading), astuple(reading), strict=True):
        text = f"{value:.1f}" if isinstance(value, float) else f"{value:,}"
        cells.append(text.rjust(max(len(each.name), 8)))
    print("  ".join(cells), flush=True)


def growth(readings: list[Reading], name: str) -> float:
    """For each 10,000 requests, of the line through all but the first quarter."""
    used = readings[len(readings) // 4 :]
    counts = [float(reading.requests) for reading in used]
    return 1e4 * statistics.linear_regression(counts, [getattr(each, name) for each in used]).slope


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="how many requests")
    parser.add_argument("--quick", action="store_true", help="200 requests")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", help="the built-in demo model by default")
    args = parser.parse_args()
    count, parts = (200, 4) if args.quick else (args.count, READINGS)
    server = Server(["--device", args.device, *([args.model] if args.model else [])])
    clients = [Client(server.port, seed) for seed in range(1, CLIENTS + 1)]
    failures: list[str] = []
    kinds = [kind for kind, share in MIX.items() for _ in range(share)]
    chooser = random.Random(0)
    began = time.perf_counter()
    try:
        print("  ".join(each.name.rjust(8) for each in fields(Reading)))
        readings = []
        for i in range(parts):
            so_far = count * (i + 1) // parts
            many = so_far - count * i // parts
            await burst(clients, chooser.choices(kinds, k=many), failures)
            readings.append(await server.read(so_far))
            show(readings[-1])
    finally:
        for client in clients:
            client.close()
        code = server.stop()
    print(f"{count / (time.perf_counter() - began):.0f} requests/s; exit code {code}")
    for name in ("rss_mib", "gpu_mib", "files", "threads"):
        print(f"growth per 10,000 requests: {name} {growth(readings, name):+.2f}")
    print(f"{len(failures)} requests went otherwise than they should {failures[:3] or ''}")


if __name__ == "__main__":
    asyncio.run(main())
