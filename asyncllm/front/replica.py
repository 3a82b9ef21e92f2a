"""One replica, as the front knows it."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncllm.supervise.child import HAND_OVER, PING
from asyncllm.supervise.front_channel import INLINE_BYTES, numbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.supervise.server import Server

#: Pings without an answer until a replica gets no new requests.
MOST_MISSED: Final = 2

_FULL: Final = (errno.EAGAIN, errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Parcel(NamedTuple):
    """A connection to hand over, and what was read from it."""

    number: int
    connection: socket.socket
    request: bytes


class Replica:
    """Gives connections to the server at one place, and notices when it does not react.

    Attributes:
        server: its process, if it has one.
        about: what it serves, in a line; empty until it was ready.
    """

    def __init__(self) -> None:
        self.server: Server | None = None
        self.about = ""
        self._unsent: deque[Parcel] = deque()
        self._missed = 0

    def began(self, server: Server) -> None:
        self.server = server
        self._missed = 0

    def lost(self) -> None:
        for parcel in self._unsent:
            if not parcel.number:
                parcel.connection.close()
        self._unsent.clear()
        self.server = None

    @property
    def is_there(self) -> bool:
        """Whether it takes requests, though its event loop may be too busy to answer now."""
        return self.server is not None and self.server.accepts

    @property
    def accepts(self) -> bool:
        """Whether it answers requests, if only to say that it is loading."""
        return self.is_there and self._missed <= MOST_MISSED

    @property
    def is_ready(self) -> bool:
        return self.accepts and self.server is not None and self.server.is_ready

    @property
    def is_behind(self) -> bool:
        """It does not take messages as fast as they come: call ``flush`` soon."""
        return bool(self._unsent)

    def hand_over(self, parcel: Parcel) -> None:
        """Send it, now or later. With number 0, the connection belongs to this object now."""
        self._unsent.append(parcel)
        if len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        channel = None if self.server is None else self.server.channel
        while self._unsent and channel is not None:
            number, connection, request = self._unsent[0]
            try:
                _send(channel, number, connection, request)
            except OSError as error:
                if error.errno in _FULL:
                    return
                # It is dead, as the front will be told soon.
                return
            self._unsent.popleft()
            if not number:
                connection.close()

    def ping(self) -> None:
        """Ask whether its event loop runs; to be called once a second."""
        if self.server is not None and self.server.accepts:
            self._missed += 1
            self.server.tell(PING)

    def answered(self) -> None:
        """It has answered a ping."""
        self._missed = 0


def able(replicas: Sequence[Replica]) -> list[int]:
    """Those that answer; if there are none, those that are too busy to: they answer late."""
    return [i for i, replica in enumerate(replicas) if replica.accepts] or [
        i for i, replica in enumerate(replicas) if replica.is_there
    ]


def _send(channel: socket.socket, number: int, connection: socket.socket, request: bytes) -> None:
    """
    Raises:
        OSError: it cannot take it now, or ever.
    """
    if len(request) <= INLINE_BYTES:
        message = numbered(HAND_OVER, number) + request
        socket.send_fds(channel, [message], [connection.fileno()])
        return
    file = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as writable:
            writable.write(request)
        fds = [connection.fileno(), file]
        socket.send_fds(channel, [numbered(HAND_OVER, number)], fds)
    finally:
        os.close(file)
