"""The serving process's side of supervision."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

#: What the serving process tells its parent: it wants to accept connections, for which it needs
#: the parent's word; and it has loaded the model.
ACCEPT: Final = b"a"
READY: Final = b"r"


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

    def close(self) -> None:
        self._channel.close()

    def _tell(self, message: bytes) -> None:
        with suppress(OSError):  # the parent is gone, and this process is about to be
            self._channel.send(message)
