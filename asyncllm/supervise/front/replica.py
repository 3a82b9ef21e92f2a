"""One replica, as the front knows it."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from asyncllm.supervise.child import HAND_OVER, PING, send
from asyncllm.supervise.front.answers import Known
from asyncllm.supervise.front_channel import FIRST_BYTES, numbered, packed
from asyncllm.supervise.server import Server

#: Pings without an answer until a replica gets no new requests.
MOST_MISSED: Final = 2


class Parcel(NamedTuple):
    """A connection to hand over, what was read from it, and how much of that at first."""

    number: int
    connection: socket.socket
    request: bytes
    num_first: int = 0


class Replica:
    """Gives connections to the server at one place, and notices when it does not react.

    Attributes:
        server: its process, if it has one.
        is_silent: a question to all has just not been answered by it in time.
        leaves: it has said that it drains.
    """

    def __init__(self) -> None:
        self._unsent: deque[Parcel] = deque()
        # The message of the first of them, and its file, until the channel takes it.
        self._packed: tuple[bytes, list[int]] | None = None
        self._is_new(None)

    def _is_new(self, server: Server | None) -> None:
        self.server = server
        self.is_silent = self.leaves = False
        self._missed = 0
        self._said, self._said_at = b"", time.monotonic()

    def began(self, server: Server) -> None:
        self._is_new(server)

    def lost(self) -> None:
        for parcel in self._unsent:
            if not parcel.number:
                parcel.connection.close()
        self._unsent.clear()
        self._unpack()
        self._is_new(None)

    @property
    def is_there(self) -> bool:
        """Whether it takes requests, though its event loop may be too busy to answer now."""
        return self.server is not None and self.server.accepts

    @property
    def _reacts(self) -> bool:
        return self.is_there and self._missed <= MOST_MISSED

    @property
    def is_stopped(self) -> bool:
        """Whether its process was stopped; it is continued, or killed soon."""
        return self.server is not None and self.server.is_stopped

    @property
    def accepts(self) -> bool:
        """Whether it answers requests, if only to say that it is loading."""
        return self._reacts and not self.is_stopped

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
            parcel = self._unsent[0]
            try:
                self._packed = self._packed or _packed(parcel)
                message, files = self._packed
                send(channel, message, [parcel.connection.fileno(), *files])
            except OSError:  # it is full; or dead, as the front will be told soon
                return
            self._unpack()
            self._unsent.popleft()
            if not parcel.number:
                parcel.connection.close()

    def _unpack(self) -> None:
        for file in () if self._packed is None else self._packed[1]:
            os.close(file)
        self._packed = None

    def ping(self) -> None:
        """Ask how it is, and whether its event loop runs; to be called once a second."""
        if self.server is not None and self.server.accepts:
            self._missed += 1
            self.server.tell(PING)

    def answered(self, how: bytes) -> None:
        """It has answered a ping, and said how it is."""
        self._missed, self.is_silent = 0, False
        self._said, self._said_at = how, time.monotonic()

    @property
    def known(self) -> Known:
        server = self.server
        return Known(
            said=self._said,
            age=time.monotonic() - self._said_at,
            is_ready=self.is_ready,
            leaves=self.leaves,
            hangs=server is not None and server.is_ready and not self._reacts,
        )


def able(replicas: Sequence[Replica]) -> list[int]:
    """Those that answer; if there are none, those that are too busy to: they answer late."""
    return [i for i, replica in enumerate(replicas) if replica.accepts] or [
        i for i, replica in enumerate(replicas) if replica.is_there
    ]


def _packed(parcel: Parcel) -> tuple[bytes, list[int]]:
    """
    Raises:
        OSError: this process has too many open files.
    """
    start = numbered(HAND_OVER, parcel.number) + parcel.num_first.to_bytes(FIRST_BYTES, "big")
    return packed(start, parcel.request)
