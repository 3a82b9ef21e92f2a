"""What a replica and the process before it tell each other of connections.

That process, the front, keeps its own end of every connection until a replica is done with it.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncllm.supervise.child import (
    HAND_OVER,
    LEAVING,
    MESSAGE_BYTES,
    PING,
    READY,
    received,
    taken,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

#: From a replica, followed by a connection's number: its answer begins; then bytes that end it
#: should the replica die.
BEGUN: Final = b"b"
#: The answer is written, and the connection is free for another request; the replica has left it.
FREE: Final = b"f"
#: The answer is written, but the replica keeps the connection, as it may have more of the client.
KEPT: Final = b"k"
#: The connection is closed.
CLOSED: Final = b"c"
#: Another replica should answer the request; this one cannot.
MOVED: Final = b"m"

#: Bytes of a connection's number. Connections with number 0 are not reported of.
NUMBER_BYTES: Final = 8
#: A request up to this size comes in the message that hands it over; a larger one in a file.
INLINE_BYTES: Final = 8 * 1024
#: Before the next attempt, when the other side does not take messages as fast as they are sent.
RETRY_SECONDS: Final = 0.002


def numbered(kind: bytes, number: int) -> bytes:
    return kind + number.to_bytes(NUMBER_BYTES, "big")


def number_of(message: bytes) -> int:
    return int.from_bytes(message[1 : 1 + NUMBER_BYTES], "big")


class HandedOver(NamedTuple):
    number: int
    connection: socket.socket
    request: bytes


class FrontChannel:
    """A replica's end; it belongs to the event loop. Nothing blocks, and nothing is lost."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        channel.setblocking(False)
        self._unsent: deque[bytes] = deque()

    def handed_over(self) -> Iterator[HandedOver]:
        """The requests that have come by now; answers pings."""
        for message, files in received(self._channel):
            if message == PING:
                self._send(PING)
            elif message.startswith(HAND_OVER) and len(files) == 2:
                yield HandedOver(number_of(message), *taken(files))
            elif message.startswith(HAND_OVER) and len(files) == 1:
                connection = socket.socket(fileno=files[0])
                request = message[1 + NUMBER_BYTES :]
                yield HandedOver(number_of(message), connection, request)
            elif message.startswith(HAND_OVER):  # no file descriptor is free here
                self.tell(MOVED, number_of(message))

    def ready(self, about: str) -> None:
        """The model is loaded; ``about`` says what it is, in a line."""
        self._send(READY + about.encode()[: MESSAGE_BYTES - 1])

    def leaving(self) -> None:
        """Other replicas should get the requests that come now."""
        self._send(LEAVING)

    def tell(self, kind: bytes, number: int, more: bytes = b"") -> None:
        if number:
            self._send(numbered(kind, number) + more)

    def _send(self, message: bytes) -> None:
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._channel.send(self._unsent[0])
            except BlockingIOError:
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)
                return
            except OSError:  # the front is gone, and this process is about to be
                self._unsent.clear()
                return
            self._unsent.popleft()
