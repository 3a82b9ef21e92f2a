"""Who answers the port, next to servers that come and go: here, for a single server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from asyncllm.supervise.child import ACCEPT, HAND_OVER, NOT_TAKEN, TAKEN
from asyncllm.supervise.held import Held
from asyncllm.supervise.outage import Outage
from asyncllm.supervise.poller import Poller
from asyncllm.supervise.server import Server


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


class MakesDoor(Protocol):
    def __call__(
        self,
        poller: Poller,
        sockets: Sequence[socket.socket],
        retry_seconds: Callable[[], float],
        tls: tuple[str, str] | None,
    ) -> Door: ...


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
        self._held = Held(self._outage)
        self._server: Server | None = None

    @property
    def deadline(self) -> float | None:
        deadlines = (self._outage.deadline, self._held.deadline)
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
                self._held.add(files)
            else:
                self._outage.serve(files[0])
        elif message == TAKEN:
            self._held.taken()
        elif message == NOT_TAKEN:
            self._held.not_taken()

    def lost(self, server: Server) -> None:
        self._held.lost()
        self._outage.open()

    def act(self) -> None:
        self._outage.expire()
        self._held.expire()
        server = self._server
        if server is not None and server.is_ready and server.channel is not None:
            self._held.send(server.channel)

    def give_up(self) -> None:
        self._held.refuse_all()

    def drop(self) -> None:
        self._outage.drop()
        self._held.drop()
