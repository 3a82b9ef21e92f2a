"""The serving process's side of supervision."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: What the serving process tells its parent: it wants to accept connections, for which it needs
#: the parent's word; and it has loaded the model.
ACCEPT: Final = b"a"
READY: Final = b"r"
#: In both directions, with two file descriptors: a connection, and a file with its request.
HAND_OVER: Final = b"h"


class Parent:
    """What a serving process inherits from the one that supervises it.

    Attributes:
        sockets: listening; both processes have them.
        restarts: how many servers have died before this one.
    """

    def __init__(self, sockets: Sequence[socket.socket], channel: socket.socket, restarts: int):
        self.sockets = sockets
        self.restarts = restarts
        self._channel = channel

    def take_over(self) -> None:
        """Returns when the parent has stopped accepting connections; it does that at once."""
        self._tell(ACCEPT)
        with suppress(OSError):
            self._channel.recv(1)

    def ready(self) -> None:
        """The model is loaded."""
        self._tell(READY)

    def hand_over(self, connection: int, request: int) -> None:
        """Give the parent a connection for the next server, and a file with its request.

        Raises:
            OSError: it cannot take any more.
        """
        flags = socket.MSG_DONTWAIT
        socket.send_fds(self._channel, [HAND_OVER], [connection, request], flags)

    def handed_over(self) -> Iterator[tuple[socket.socket, bytes]]:
        """The connections from the server before that have come by now, and their requests."""
        while True:
            try:
                message, files, _, _ = socket.recv_fds(self._channel, 64, 2, socket.MSG_DONTWAIT)
            except OSError:
                return
            if message != HAND_OVER or len(files) != 2:
                return
            with open(files[1], "rb") as file:
                file.seek(0)
                request = file.read()
            yield socket.socket(fileno=files[0]), request

    def fileno(self) -> int:
        """Readable when ``handed_over`` has something."""
        return self._channel.fileno()

    def close(self) -> None:
        self._channel.close()

    def _tell(self, message: bytes) -> None:
        with suppress(OSError):  # the parent is gone, and this process is about to be
            self._channel.send(message)
