"""The connections of a library that has no call to end them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Connections:
    """Sockets that were connected inside ``opening``, so that another thread can cut them."""

    def __init__(self) -> None:
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Meanwhile this process connects what ``cut`` ends, and next to nothing else."""
        before = _sockets()
        yield
        opened = [file for name, file in _sockets().items() if name not in before]
        self._ends += filter(None, map(_connection, opened))

    def cut(self) -> None:
        """End them, as if the other side had; from any thread."""
        with self._lock:
            for end in self._ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Forget them. May be called again."""
        with self._lock:
            for end in self._ends:
                end.close()
            self._ends.clear()


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by names that no other socket has."""
    found = {}
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, as that of this folder
            name = os.readlink(f"/proc/self/fd/{file}")
            if name.startswith("socket:"):
                found[name] = int(file)
    return found


def _connection(file: int) -> socket.socket | None:
    """The TCP connection that a socket is, by a descriptor of its own; None if it is none."""
    try:
        end = socket.socket(fileno=os.dup(file))
    except OSError:  # closed meanwhile
        return None
    try:
        end.getpeername()
    except OSError:  # it listens, say
        end.close()
        return None
    if end.family in (socket.AF_INET, socket.AF_INET6):
        return end
    end.close()
    return None
