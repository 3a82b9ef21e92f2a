"""Who answers the port, next to servers that come and go: here, for a single server."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from asyncllm.supervise.child import ACCEPT, HAND_OVER, NOT_TAKEN, TAKEN, send
from asyncllm.supervise.crowd import FileLimit
from asyncllm.supervise.outage import Outage
from asyncllm.supervise.poller import Poller
from asyncllm.supervise.server import Server

#: Two file descriptors each; beyond that, or when few are left, the oldest get 503.
MOST_UNSERVED: Final = 256
#: A request that no server takes in this time gets 503.
UNSERVED_SECONDS: Final = 60.0
#: Before the next attempt, when the server does not take them as fast as they are sent.
SEND_SECONDS: Final = 0.01


class _Request(NamedTuple):
    connection: socket.socket
    file: int
    deadline: float


class Unserved:
    """Requests of a server whose engine has died, until the next server takes them.

    Each is a connection, with the bytes of the request in a file without a name.

    A server may end before it has taken what it was given. So each is kept here until then.
    """

    def __init__(self, outage: Outage):
        self._outage = outage
        self._requests: deque[_Request] = deque()
        self._given: deque[_Request] = deque()  # to a server that has not taken them yet
        self._send_at: float | None = None
        self._limit = FileLimit.now()

    @property
    def deadline(self) -> float | None:
        """When ``expire`` or ``send`` has something to do."""
        if self._send_at is not None:
            return self._send_at
        return self._requests[0].deadline if self._requests else None

    def add(self, files: list[int]) -> None:
        """Take what a server has handed over."""
        is_full = len(self._requests) >= MOST_UNSERVED or max(files) >= self._limit.connections
        if is_full and self._requests:
            self._refuse(self._requests.popleft())
        connection = socket.socket(fileno=files[0])
        self._requests.append(_Request(connection, files[1], time.monotonic() + UNSERVED_SECONDS))

    def expire(self) -> None:
        while self._requests and self._requests[0].deadline <= time.monotonic():
            self._refuse(self._requests.popleft())

    def send(self, channel: socket.socket) -> None:
        """Give all to a server that is ready, or as many as it takes for now."""
        self._send_at = None
        while self._requests:
            connection, file, _ = self._requests[0]
            try:
                send(channel, HAND_OVER, [connection.fileno(), file])
            except ConnectionError:  # it is dead: the next one may take them
                return
            except OSError:  # it does not take them as fast as they are sent
                self._send_at = time.monotonic() + SEND_SECONDS
                return
            self._given.append(self._requests.popleft())

    def taken(self) -> None:
        """The server has the oldest that it was given."""
        if self._given:
            _close(self._given.popleft())

    def not_taken(self) -> None:
        """The server could not take the oldest that it was given."""
        if self._given:
            self._refuse(self._given.popleft())

    def lost(self) -> None:
        """The server has ended: the next one gets what it has not taken."""
        self._requests.extendleft(reversed(self._given))
        self._given.clear()

    def refuse_all(self) -> None:
        """There will be no server."""
        self.lost()
        while self._requests:
            self._refuse(self._requests.popleft())

    def drop(self) -> None:
        """Close this process's ends."""
        self.lost()
        while self._requests:
            _close(self._requests.popleft())

    def _refuse(self, request: _Request) -> None:
        os.close(request.file)
        self._outage.refuse(request.connection, at_once=True)


def _close(request: _Request) -> None:
    request.connection.close()
    os.close(request.file)


class Door(Protocol):
    """What the supervisor tells of its servers, and what it runs between two events."""

    @property
    def deadline(self) -> float | None:
        """When ``act`` has something to do."""

    def open(self) -> None:
        """Clients get an answer from now on."""

    def began(self, server: Server) -> None:
        """It has a process, which does not serve yet."""

    def said(self, server: Server, message: bytes, files: list[int]) -> None:
        """A message of a server, with file descriptors that belong to this object now."""

    def lost(self, server: Server) -> None:
        """Its process has ended; called before it is started again."""

    def act(self) -> None:
        """Do what is due."""

    def give_up(self) -> None:
        """There will be no server: tell those that wait for one."""

    def drop(self) -> None:
        """Close this process's ends of all connections, without a word."""


MakesDoor: TypeAlias = Callable[
    [Poller, Sequence[socket.socket], Callable[[], float], tuple[str, str] | None], Door
]


class SingleDoor:
    """The server accepts connections itself; while there is none, clients get 503."""

    def __init__(
        self,
        poller: Poller,
        sockets: Sequence[socket.socket],
        retry_seconds: Callable[[], float],
        tls: tuple[str, str] | None,
    ):
        """
        Args:
            retry_seconds: when a client may try again, for ``Retry-After``.
            tls: files of a certificate and its key.
        """
        self._outage = Outage(poller, sockets, retry_seconds, tls)
        self._unserved = Unserved(self._outage)
        self._server: Server | None = None

    @property
    def deadline(self) -> float | None:
        deadlines = (self._outage.deadline, self._unserved.deadline)
        return min((at for at in deadlines if at is not None), default=None)

    def open(self) -> None:
        self._outage.open()

    def began(self, server: Server) -> None:
        self._server = server

    def said(self, server: Server, message: bytes, files: list[int]) -> None:
        if message == ACCEPT:
            self._outage.close()
            server.tell(ACCEPT)
        elif message == HAND_OVER and files:
            server.is_ready = False  # it is about to end
            if len(files) == 2:
                self._unserved.add(files)
            else:
                self._outage.serve(files[0])
        elif message == TAKEN:
            self._unserved.taken()
        elif message == NOT_TAKEN:
            self._unserved.not_taken()

    def lost(self, server: Server) -> None:
        self._unserved.lost()
        self._outage.open()

    def act(self) -> None:
        self._outage.expire()
        self._unserved.expire()
        server = self._server
        if server is not None and server.is_ready and server.channel is not None:
            self._unserved.send(server.channel)

    def give_up(self) -> None:
        self._unserved.refuse_all()

    def drop(self) -> None:
        self._outage.drop()
        self._unserved.drop()
