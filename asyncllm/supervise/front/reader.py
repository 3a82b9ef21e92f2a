"""Clients' connections, of which requests are read until a replica can be chosen."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from asyncllm.errors import Crowded
from asyncllm.supervise.crowd import EXHAUSTED, PROBES, Crowd, Use
from asyncllm.supervise.front.request import MOST_HEAD, Head, read_head
from asyncllm.supervise.front.router import Placed
from asyncllm.supervise.poller import Expiring, Poller

#: Of a request's bytes, the front waits for so many. A longer one is routed by its beginning, and
#: cannot move to another replica.
MOST_BYTES: Final = 2**20
_END: Final = b"\r\n\r\n"
log = logging.getLogger(__name__)
#: The rest of a head is waited for so long. Then a replica reads on, and finds what is wrong.
HEAD_SECONDS: Final = 0.05
#: The rest of a body, and each part of it; then its beginning decides.
BODY_SECONDS, PART_SECONDS = 2.0, 0.25
#: Before accepting again: without file descriptors, and when room is being made.
RETRY_SECONDS, CROWDED_SECONDS = 0.1, 0.02
#: How often the log says that there are none.
LOG_SECONDS: Final = 60.0
#: At once: connections accepted; closed because they were idle; and placed because the rest of
#: their request was not waited for.
MOST_ACCEPTED: Final = 16
MOST_CLOSED: Final = 128
MOST_PLACED: Final = 4
#: Bytes read at once: until the head has ended, and after that.
HEAD_BYTES, BODY_BYTES = 2**14, 2**18
#: Of requests that are read or wait for their answer; beyond, none is read to its end, or moves.
ROOM_BYTES: Final = 256 * 2**20


class Room:
    """Bounds the bytes of all requests that are being read, or could still move."""

    def __init__(self, most: int):
        self.left = most


@dataclass(slots=True, eq=False)
class Client:
    """It belongs to the front, which reads its next request, or to a replica, which answers that.

    Attributes:
        number: names the connection between the front and its replicas.
        data: the request, as far as it was read; empty once its answer has begun.
        num_first: bytes that were there when the head was: a parser that gets them by themselves
            does what it would do on a connection of its own.
        head: of that request; None before it has ended.
        use: what it may be used for.
        leave: closes it if it is idle, and says whether it was.
        placed: at which replica it is; None while it is here.
        has_begun: the replica has begun to answer, or has more of the client than ``data``.
        begins_at: where in the stream of what is ``sent`` to the client the answer begins.
        last_words: end the answer, should the replica die.
        has_moved: another replica was given the request before.
    """

    socket: socket.socket
    number: int
    room: Room
    use: Use = Use.FREELY
    leave: Callable[[], bool] = lambda: False
    placed: Placed | None = None
    data: bytearray = field(default_factory=bytearray)
    head: Head | None = None
    num_first: int = 0
    has_begun: bool = False
    begins_at: int = 0
    has_moved: bool = False
    last_words: bytes = b""

    def reset(self) -> None:
        """The next request begins."""
        self.drop()
        self.head = None
        self.num_first = 0
        self.has_begun = False
        self.begins_at = 0
        self.has_moved = False
        self.last_words = b""

    def drop(self) -> None:
        """Keep nothing of this request any more."""
        self.room.left += len(self.data)
        self.data = bytearray()

    def close(self) -> None:
        self.drop()
        self.socket.close()

    def add(self, data: bytes) -> None:
        self.room.left -= len(data)
        start = max(0, len(self.data) - len(_END) + 1)
        self.data += data
        if self.head is None and (end := self.data.find(_END, start)) >= 0:
            self.head = read_head(bytes(self.data[: end + len(_END)]))
            self.num_first = len(self.data)

    def is_enough(self) -> bool:
        """Whether a replica can be chosen."""
        head = self.head
        if head is None:
            return len(self.data) > MOST_HEAD or not self.data[:1].isupper()
        if self.room.left < 0 or head.body_bytes is None or not head.has_prompt:
            return True
        return len(self.data) >= head.num_bytes + min(head.body_bytes, MOST_BYTES)

    def is_whole(self) -> bool:
        """Whether ``data`` is one request, with no byte missing or too many."""
        head = self.head
        if head is None or head.body_bytes is None:
            return False
        return len(self.data) == head.num_bytes + head.body_bytes

    @property
    def probe(self) -> str:
        """What all replicas are to be asked; empty if one of them should answer."""
        return self.head.probe if self.head is not None and self.is_whole() else ""

    @property
    def body(self) -> bytes:
        return b"" if self.head is None else bytes(self.data[self.head.num_bytes :])


class Reader:
    """Owns connections until ``place`` gets them, and those that are given back."""

    def __init__(
        self,
        poller: Poller,
        sockets: Sequence[socket.socket],
        request_seconds: float,
        place: Callable[[Client], None],
    ):
        """
        Args:
            request_seconds: a connection that sends nothing for so long is closed.
            place: gets each client of whose request enough is there.
        """
        self._poller = poller
        self._sockets = sockets
        self._place = place
        self._numbers = count(1)
        self._room = Room(ROOM_BYTES)
        self._crowd = Crowd()
        self._idle: Expiring[Client] = Expiring(request_seconds)
        self._heads: Expiring[Client] = Expiring(HEAD_SECONDS)
        self._bodies: Expiring[Client] = Expiring(BODY_SECONDS)
        self._parts: Expiring[Client] = Expiring(PART_SECONDS)
        self._accept_at: float | None = None
        self._log_at = 0.0

    @property
    def deadline(self) -> float | None:
        """When ``act`` has something to do."""
        times = [waiting.deadline for waiting in (self._idle, *self._begun)]
        return min((at for at in (*times, self._accept_at) if at is not None), default=None)

    @property
    def num_clients(self) -> int:
        return len(self._idle) + len(self._heads) + len(self._bodies)

    @property
    def _begun(self) -> tuple[Expiring[Client], ...]:
        """Where clients are whose request has begun."""
        return self._heads, self._bodies, self._parts

    def open(self) -> None:
        """Accept connections from now on."""
        self._accept_at = None
        for listening in self._sockets:
            if self._crowd.is_full(listening.fileno()):
                self._pause(CROWDED_SECONDS)
                return
            self._poller.add(listening, partial(self._accept, listening))

    def refusal(self, client: Client) -> Crowded | None:
        """Why its request is not served: it is no probe, and there are too many connections."""
        path = "" if client.head is None else client.head.path
        if client.use is not Use.PROBING or path in PROBES:
            return None
        return self._crowd.refusal()

    def listen(self, client: Client) -> None:
        """Wait for a request."""
        self._idle.add(client)
        self._crowd.rests(client)
        self._poller.add(client.socket, partial(self._read, client))

    def act(self) -> None:
        for client in self._idle.due(MOST_CLOSED):
            self._leave(client)
            client.close()
        for waiting in self._begun:
            for client in waiting.due(MOST_PLACED):
                self._leave(client)
                self._place(client)
        if self._accept_at is not None and time.monotonic() >= self._accept_at:
            self.open()

    def drop(self) -> None:
        """Close this process's ends of all connections."""
        for client in (*self._idle, *self._heads, *self._bodies):
            client.close()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(MOST_ACCEPTED):
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    if (now := time.monotonic()) >= self._log_at:
                        self._log_at = now + LOG_SECONDS
                        log.error("cannot accept connections, will keep trying: %s", error.strerror)
                    self._pause(RETRY_SECONDS)
                    return
                continue  # one broken connection
            connection.setblocking(False)
            client = Client(connection, next(self._numbers), self._room)
            self._crowd.num_open = connection.fileno()  # about as many
            client.use = self._crowd.use_of(connection.fileno())
            client.leave = partial(self._close_idle, client)
            self.listen(client)
            self._read(client)  # its request is there, most likely
            if connection.fileno() >= self._crowd.limit.probes:
                self._pause(CROWDED_SECONDS)
                return

    def _pause(self, seconds: float) -> None:
        """Accept nothing for a while."""
        self._accept_at = time.monotonic() + seconds
        for listening in self._sockets:
            self._poller.remove(listening)

    def _read(self, client: Client) -> None:
        try:
            data = client.socket.recv(HEAD_BYTES if client.head is None else BODY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
            client.drop()
        if not data and not client.data:
            self._leave(client)
            client.close()
            return
        client.add(data)
        is_refused = client.head is not None and client.use is Use.PROBING and not client.probe
        if not data or client.is_enough() or is_refused:
            self._leave(client)
            self._place(client)
        else:
            self._idle.discard(client)
            self._crowd.works(client)
            if client.head is None:
                self._heads.add(client)
            else:
                if client not in self._bodies:
                    self._poller.add(client.socket, partial(self._read, client), is_heavy=True)
                self._heads.discard(client)
                self._bodies.add(client)
                self._parts.discard(client)
                self._parts.add(client)

    def _close_idle(self, client: Client) -> bool:
        """The crowd calls it, and forgets the client itself."""
        with suppress(OSError):
            if client.socket.recv(1, socket.MSG_PEEK):
                return False
        self._idle.discard(client)
        self._poller.remove(client.socket)
        client.close()
        return True

    def _leave(self, client: Client) -> None:
        """Read no more of it."""
        self._crowd.works(client)
        for waiting in (self._idle, *self._begun):
            waiting.discard(client)
        self._poller.remove(client.socket)
