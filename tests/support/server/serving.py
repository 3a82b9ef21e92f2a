"""A real server on a real socket, in a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import uvloop
from aiohttp import web

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.app import create_app
from asyncllm.server.http.browsers import guard
from asyncllm.server.http.listener import Listener
from asyncllm.supervise.front.hosts import hosts_of
from asyncllm.supervise.listening import bind
from tests.support.server.fake_llm import FakeLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncllm.server.model import Model
    from asyncllm.supervise.tls import Tls

T = TypeVar("T")
#: Seconds for a server to start, to answer or to end, on a machine that is very busy.
PATIENCE = 40.0


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        """Of JSON, each of them ended."""
        *lines, rest = self.body.split(b"\n")
        assert rest == b""
        return [json.loads(line) for line in lines]

    @property
    def frames(self) -> list[Any]:
        """The events of a stream, which must end with [DONE]."""
        *frames, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(frame.startswith("data: ") for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    @property
    def events(self) -> list[Any]:
        """The events of a stream that gives them names; each is named as its data says."""
        *events, rest = self.body.decode().split("\n\n")
        assert rest == ""
        named = [re.fullmatch("event: (.+)\ndata: (.+)", event) for event in events]
        bodies = [(match[1], json.loads(match[2])) for match in named if match]
        assert len(bodies) == len(events)
        assert all(name == body["type"] for name, body in bodies)
        return [body for _, body in bodies]


class Server:
    def __init__(self, llm: FakeLLM, port: int, prefix: str, loop: asyncio.AbstractEventLoop):
        self.llm = llm
        self.port = port
        self.prefix = prefix
        self.url = f"http://127.0.0.1:{port}{prefix}"
        self._loop = loop

    def call(self, function: Callable[[], T]) -> T:
        """Run something on the server's loop."""

        async def on_loop() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(PATIENCE)

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not self.call(condition):
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.005)

    def until_idle(self) -> None:
        """Wait until nothing runs, waits, or has a place in the queue."""
        stats = self.llm.stats
        self.until(lambda: stats.running == stats.waiting == self.llm.num_reserved == 0)
        assert stats.books_healed == 0

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with closing(connection):
            connection.request(method, self.prefix + path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, headers)

    def open(
        self, path: str, body: Any, *, version: str = "1.1", extra: str = "", method: str = "POST"
    ) -> socket.socket:
        """Send a request on a socket of its own, with little room for answers, and leave it."""
        data = json.dumps(body).encode()
        head = f"{method} {self.prefix}{path} HTTP/{version}\r\nHost: x\r\n{extra}"
        client = socket.socket()
        client.settimeout(10)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", self.port))
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return client


@contextmanager
def serving(
    make_llm: Callable[[], Model] = FakeLLM,
    config: ServerConfig | None = None,
    *,
    prefix: str = "",
    handler_cancellation: bool = True,
    tls: Tls | None = None,
    is_guarded: bool = False,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> Iterator[Server]:
    """Serve a fake, or a model; with a ``prefix``, as part of another application."""
    server_config = config or ServerConfig()
    started: Future[tuple[Server, Callable[[], object]]] = Future()

    async def main() -> None:
        llm = make_llm()
        await llm.start()
        app = create_app(llm, server_config)
        if is_guarded:  # as ``asyncllm serve`` without keys
            hosts = hosts_of(server_config)
            assert hosts is not None
            app.middlewares.append(guard(hosts, server_config.cors_origin))
        if prefix:
            host = web.Application()
            host.add_subapp(prefix, app)
            app = host
        listener = Listener(
            app,
            request_seconds=server_config.request_seconds,
            close_seconds=0.5,
            handler_cancellation=handler_cancellation,
        )
        await listener.start(bind("127.0.0.1", 0), tls)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = Server(cast("FakeLLM", llm), listener.address[1], prefix, loop)
        started.set_result((server, lambda: loop.call_soon_threadsafe(stop.set)))
        await stop.wait()
        if isinstance(llm, FakeLLM):
            llm.resume()
        await listener.aclose()
        await llm.aclose()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    server, stop = started.result(PATIENCE)
    try:
        yield server
    finally:
        stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


class ServerProcess:
    """A running ``asyncllm serve`` of the demo model, on the CPU unless the options say otherwise.

    Args:
        env: its environment; this process's by default.
        log: where its stderr goes; to this process's by default.
        program: a module and its first arguments, that take the options of ``asyncllm serve``.
    """

    def __init__(
        self,
        *options: str,
        env: dict[str, str] | None = None,
        log: IO[str] | None = None,
        program: tuple[str, ...] = ("asyncllm", "serve"),
    ):
        command = [sys.executable, "-m", *program, "--device", "cpu", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=log, text=True, env=env
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"ready on (http://\S+:(\d+))", line)
        if match is None:
            self.stop()
            raise AssertionError(f"the server said {line!r}")
        self.url, self.port = match[1], int(match[2])

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        with self.process.stdout:  # until it has ended, for what it still prints
            return self.process.wait(PATIENCE)
