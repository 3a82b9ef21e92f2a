"""A client's connection, as the front knows it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

from asyncllm.supervise.crowd import Use
from asyncllm.supervise.front.request import MOST_HEAD, Head, read_head
from asyncllm.supervise.front.router import Placed

#: Of a request's bytes, the front waits for so many. A longer one is routed by its beginning, and
#: cannot move to another replica.
MOST_BYTES: Final = 2**20
_END: Final = b"\r\n\r\n"


class Room:
    """Bounds the bytes of all requests that are being read, or could still move."""

    def __init__(self, most: int):
        self.left = most


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

    __slots__ = (
        "begins_at",
        "data",
        "has_begun",
        "has_moved",
        "head",
        "last_words",
        "leave",
        "num_first",
        "number",
        "placed",
        "room",
        "socket",
        "use",
    )

    def __init__(self, connection: socket.socket, number: int, room: Room):
        self.socket = connection
        self.number = number
        self.room = room
        self.use = Use.FREELY
        self.leave: Callable[[], bool] = lambda: False
        self.placed: Placed | None = None
        self.data = bytearray()
        self.reset()

    def reset(self) -> None:
        """The next request begins."""
        self.drop()
        self.head: Head | None = None
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
