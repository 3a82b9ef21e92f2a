"""A load process: it sends requests and records when the events of their answers arrive.

One process cannot read the events of many streams in time, so ``online.py`` deals a case out to
several. They share a clock: ``time.perf_counter`` is the system's.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
import time
from collections import deque
from ctypes import c_ulong
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from asyncllm.lab.bench.cases import Shot
from asyncllm.lab.bench.stream import Connection, Failure
from asyncllm.system.event_loop import new_event_loop

#: An answer that takes longer, in seconds, is a failure.
PATIENCE: Final = 600.0


class Target(msgspec.Struct, frozen=True):
    """A model on a server with OpenAI's API; ``url`` is without /v1.

    Prompts have token ids below ``vocab_size``.
    """

    url: str
    model: str
    vocab_size: int
    api_key: str | None = None


class Job(msgspec.Struct, frozen=True):
    """The part of an ``OnlineCase`` for one process."""

    target: Target
    clients: int
    shots: list[Shot]


class Answered(msgspec.Struct, frozen=True):
    """The answer to a shot.

    Attributes:
        long: as in the shot.
        sent: seconds of ``time.perf_counter``.
        tokens: generated tokens, by the server's usage; without usage, the events.
        times: float64 bytes; arrival of each event with text.
        failure: why there is no answer, else None.
    """

    long: bool
    sent: float
    tokens: int = 0
    times: bytes = b""
    failure: str | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The answers of a process, and its CPU time over the time it took."""

    answered: list[Answered]
    cpu_share: float


def process_main(pipe: Pipe, num_done: c_ulong) -> None:
    """Run jobs until the pipe is closed: for each, report "ready" and wait for the start time.

    Args:
        num_done: shared memory; counts the answered or failed shots of a job.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    gc.disable()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        while True:
            try:
                job = msgspec.msgpack.decode(pipe.recv_bytes(), type=Job)
                requests = [request(job.target, shot) for shot in job.shots]
                num_done.value = 0
                pipe.send_bytes(b"ready")
                start = msgspec.msgpack.decode(pipe.recv_bytes(), type=float)
                outcome = runner.run(make_load(job, requests, start, num_done))
                pipe.send_bytes(msgspec.msgpack.encode(outcome))
            except (EOFError, BrokenPipeError):
                return
            gc.collect()


def request(target: Target, shot: Shot) -> bytes:
    """The bytes to send for a shot."""
    url = urlsplit(target.url)
    path, fields = _prompt_fields(target, shot)
    body = msgspec.json.encode(
        {
            "model": target.model,
            **fields,
            "max_tokens": shot.num_out,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    key = "" if target.api_key is None else f"Authorization: Bearer {target.api_key}\r\n"
    head = (
        f"POST {url.path.rstrip('/')}/v1/{path} HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Content-Type: application/json\r\n{key}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _prompt_fields(target: Target, shot: Shot) -> tuple[str, dict[str, Any]]:
    """The route for the kind of prompt, and its fields of the body."""
    given = shot.given
    if given is None:
        prompt = shot.prompt(target.vocab_size)
        return "completions", {"prompt": prompt, "ignore_eos": True}
    if isinstance(given, list) and isinstance(given[0], dict):
        return "chat/completions", {"messages": given}
    return "completions", {"prompt": given}


async def make_load(job: Job, requests: list[bytes], start: float, num_done: c_ulong) -> Outcome:
    """Send every shot at its time, or as soon as a client is free.

    Args:
        requests: ``request`` of each shot.
        start: the time, by ``time.perf_counter``, from which ``Shot.at`` counts.
    """
    server = _Connections(job.target)
    queue = deque(zip(job.shots, requests, strict=True))
    answered: list[Answered] = []

    async def ask(shot: Shot, data: bytes) -> None:
        answered.append(await server.ask(shot, data))
        num_done.value = len(answered)

    async def client() -> None:
        while queue:
            await ask(*queue.popleft())

    async def once(shot: Shot, data: bytes) -> None:
        await _until(start + (shot.at or 0.0))
        await ask(shot, data)

    await _until(start)
    cpu, began = time.process_time(), time.perf_counter()
    if job.clients:
        await asyncio.gather(*(client() for _ in range(job.clients)))
    else:
        await asyncio.gather(*(once(*item) for item in queue))
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    server.close()
    return Outcome(answered, share)


class _Connections:
    """Connections to one server, each used for one request after the other."""

    def __init__(self, target: Target):
        url = urlsplit(target.url)
        self._host = url.hostname or ""
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._ssl else 80)
        self._idle: list[Connection] = []

    async def ask(self, shot: Shot, data: bytes) -> Answered:
        sent = time.perf_counter()
        try:
            connection = await self._connect()
            try:
                async with asyncio.timeout(PATIENCE):
                    reading = await connection.send(data)
            except TimeoutError:
                connection.close()
                raise Failure(f"no answer in {PATIENCE:.0f} s") from None
        except (Failure, OSError) as error:
            return Answered(shot.long, sent, failure=str(error))
        self._idle.append(connection)
        if not reading.times:
            return Answered(shot.long, sent, failure="an answer without text")
        tokens = reading.tokens or len(reading.times)
        return Answered(shot.long, sent, tokens, reading.times.tobytes())

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._host, self._port, ssl=self._ssl
        )
        return connection


async def _until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - time.perf_counter()))
