"""Requests of a server whose engine has died, until the next server takes them."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncllm.supervise.child import HAND_OVER
from asyncllm.supervise.crowd import FileLimit

if TYPE_CHECKING:
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
    """Connections, with the bytes of their requests in files without a name."""

    def __init__(self, outage: Outage):
        self._outage = outage
        self._requests: deque[_Request] = deque()
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
                socket.send_fds(channel, [HAND_OVER], [connection.fileno(), file])
            except BlockingIOError:
                self._send_at = time.monotonic() + SEND_SECONDS
                return
            except OSError:  # it is dead: the next one may take them
                return
            self._requests.popleft()
            connection.close()
            os.close(file)

    def drop(self) -> None:
        """Close this process's ends."""
        while self._requests:
            connection, file, _ = self._requests.popleft()
            connection.close()
            os.close(file)

    def _refuse(self, request: _Request) -> None:
        os.close(request.file)
        self._outage.refuse(request.connection, at_once=True)
