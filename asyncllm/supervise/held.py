"""Requests of a server whose engine has died, until the next server takes them."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from typing import Final, NamedTuple

from asyncllm.supervise.child import HAND_OVER, send
from asyncllm.supervise.crowd import FileLimit
from asyncllm.supervise.outage import Outage

#: Two file descriptors each; beyond that, or when few are left, the oldest get 503.
MOST_HELD: Final = 256
#: A request that no server takes in this time gets 503.
HOLD_SECONDS: Final = 60.0
#: Before the next attempt, when the server does not take them as fast as they are sent.
SEND_SECONDS: Final = 0.01


class _Request(NamedTuple):
    connection: socket.socket
    file: int
    deadline: float


class Held:
    """Connections, with the bytes of their requests in files without a name.

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
        is_full = len(self._requests) >= MOST_HELD or max(files) >= self._limit.connections
        if is_full and self._requests:
            self._refuse(self._requests.popleft())
        connection = socket.socket(fileno=files[0])
        self._requests.append(_Request(connection, files[1], time.monotonic() + HOLD_SECONDS))

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
