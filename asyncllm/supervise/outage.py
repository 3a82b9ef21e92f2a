"""Answers for clients while no server runs: 503, and when to try again."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from asyncllm.errors import AsyncLLMError, BadRequest, NotReady
from asyncllm.supervise.crowd import EXHAUSTED, FileLimit
from asyncllm.supervise.poller import READ, WRITE, Poller

T = TypeVar("T")

#: Clients served at once; others wait in the kernel's queue.
MOST_CLIENTS: Final = 256
#: Limit for the whole exchange with one client; and while others wait.
CLIENT_SECONDS: Final = 5.0
CROWDED_SECONDS: Final = 0.05
#: Without file descriptors, before accepting again.
RETRY_SECONDS: Final = 0.1
#: The rest of a request is not waited for.
MAX_HEAD: Final = 16 * 1024

STARTING: Final = NotReady("the server is starting")


class Outage:
    """Accepts connections while it is open, and answers each with 503 and ``Retry-After``."""

    def __init__(
        self,
        poller: Poller,
        sockets: Sequence[socket.socket],
        retry_seconds: Callable[[], float],
        tls: tuple[str, str] | None = None,
    ):
        """
        Args:
            sockets: listening, and not blocking.
            retry_seconds: when a client may try again, for ``Retry-After``.
            tls: files of a certificate and its key.
        """
        self._poller = poller
        self._sockets = sockets
        self._retry_seconds = retry_seconds
        self._tls = tls
        self._waits: Mapping[type[OSError], int] = {}
        self._is_open = False
        self._limit = FileLimit.now()
        self._is_full = False
        self._retry_at: float | None = None
        #: What is done with each, and since when.
        self._clients: dict[socket.socket, tuple[Generator[int, None, None], float]] = {}

    def open(self) -> None:
        self._is_open = True
        self._listen()

    def close(self) -> None:
        """Accept no more; those that were accepted get their answer."""
        self._is_open = False
        self._listen()

    def drop(self) -> None:
        """Close this process's ends of all connections, without a word."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do."""
        if self._retry_at is not None:
            return self._retry_at
        return next((since + self._seconds for _, since in self._clients.values()), None)

    @property
    def _seconds(self) -> float:
        return CROWDED_SECONDS if self._is_full else CLIENT_SECONDS

    def expire(self) -> None:
        """Close connections that took too long."""
        now = time.monotonic()
        for client, (_, since) in list(self._clients.items()):
            if since + self._seconds > now:
                break
            self._end(client)
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._listen()

    def _listen(self) -> None:
        files = max((client.fileno() for client in self._clients), default=0)
        self._is_full = len(self._clients) >= MOST_CLIENTS or files >= self._limit.connections
        listens = self._is_open and not self._is_full and self._retry_at is None
        for listening in self._sockets:
            if listens:
                self._poller.add(listening, partial(self._accept, listening))
            else:
                self._poller.remove(listening)

    def _accept(self, listening: socket.socket) -> None:
        try:
            client, _ = listening.accept()
        except OSError as error:  # it has gone, or there are no file descriptors
            if error.errno in EXHAUSTED:
                self._retry_at = time.monotonic() + RETRY_SECONDS
                self._listen()
            return
        client.setblocking(False)
        if self._tls is not None:
            try:
                client = self._wrap(client, *self._tls)
            except (OSError, BadRequest):  # the server will say what is wrong with the files
                client.close()
                return
        self._begin(client, self._serve(client))

    def serve(self, file: int) -> None:
        """Answer the next request of a client, whose connection this is; without TLS."""
        client = socket.socket(fileno=file)
        client.setblocking(False)
        self._begin(client, self._serve(client))

    def refuse(
        self, client: socket.socket, error: AsyncLLMError = STARTING, *, at_once: bool = False
    ) -> None:
        """Answer a connection whose request was read before; without TLS.

        Args:
            at_once: close it then; else it may have more to send, which is read before.
        """
        self.finish(client, self._answer(error, with_body=True), at_once=at_once)

    def finish(self, client: socket.socket, last: bytes, *, at_once: bool = False) -> None:
        """Write this to a connection, and close it; without TLS."""
        client.setblocking(False)
        self._begin(client, self._write(client, last, at_once=at_once))

    def _begin(self, client: socket.socket, work: Generator[int, None, None]) -> None:
        self._clients[client] = (work, time.monotonic())
        self._listen()
        self._advance(client)

    def _wrap(self, client: socket.socket, cert: str, key: str) -> socket.socket:
        from asyncllm.supervise.tls import WAITS, load_context

        self._waits = WAITS
        context = load_context(cert, key)
        return context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)

    def _advance(self, client: socket.socket) -> None:
        work, _ = self._clients[client]
        try:
            events = next(work)
        except (StopIteration, OSError):
            self._end(client)
        else:
            self._poller.add(client, partial(self._advance, client), events)

    def _end(self, client: socket.socket) -> None:
        del self._clients[client]
        self._poller.remove(client)
        client.close()
        self._listen()

    def _serve(self, client: socket.socket) -> Generator[int, None, None]:
        """The exchange with one client; yields the events that it waits for."""
        if self._tls is not None:
            handshake = getattr(client, "do_handshake")  # noqa: B009 - of an SSLSocket
            yield from self._when(READ, handshake)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < MAX_HEAD:
            more = yield from self._when(READ, partial(client.recv, MAX_HEAD))
            if not more:
                return
            head += more
        yield from self._write(
            client, self._answer(STARTING, with_body=not head.startswith(b"HEAD "))
        )

    def _write(
        self, client: socket.socket, answer: bytes, *, at_once: bool = False
    ) -> Generator[int, None, None]:
        while answer:
            sent = yield from self._when(WRITE, partial(client.send, answer))
            answer = answer[sent:]
        # Closing with unread bytes would reset the connection, and the answer might get lost.
        client.shutdown(socket.SHUT_WR)
        while not at_once and (yield from self._when(READ, partial(client.recv, MAX_HEAD))):
            pass

    def _answer(self, error: AsyncLLMError, *, with_body: bool) -> bytes:
        detail = {"message": error.message, "type": error.type, "param": None, "code": error.code}
        body = msgspec.json.encode({"error": detail})
        seconds = max(1, math.ceil(self._retry_seconds()))
        head = (
            "HTTP/1.1 503 Service Unavailable\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            f"Retry-After: {seconds}\r\n"
            f"retry-after-ms: {seconds * 1000}\r\n"
            "x-should-retry: true\r\n"
            f"X-Request-Id: {os.urandom(16).hex()}\r\n"
            "Server: asyncllm\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (body if with_body else b"")

    def _when(self, events: int, call: Callable[[], T]) -> Generator[int, None, T]:
        """Make the call once it does not block; yields ``events`` while it would."""
        while True:
            try:
                return call()
            except (BlockingIOError, InterruptedError):
                yield events
            except OSError as error:
                if type(error) not in self._waits:
                    raise
                yield self._waits[type(error)]
