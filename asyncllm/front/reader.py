"""Reads requests, each until a replica can be chosen for it."""

from __future__ import annotations

import errno
import logging
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

from asyncllm.front.client import Client, Room
from asyncllm.front.expiring import Expiring

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from asyncllm.supervise.poller import Poller

log = logging.getLogger(__name__)

#: The rest of a head is waited for so long. Then a replica reads on, and finds what is wrong.
HEAD_SECONDS: Final = 0.05
#: The rest of a body; then its beginning decides.
BODY_SECONDS: Final = 2.0
#: Without file descriptors: before accepting again, and how often the log says so.
ACCEPT_SECONDS, LOG_SECONDS = 0.1, 60.0
#: Connections accepted, and bytes read, at once.
MOST_ACCEPTED: Final = 128
READ_BYTES: Final = 2**18
#: Of requests that are read or wait for their answer; beyond, none is read to its end, or moves.
MOST_BYTES: Final = 256 * 2**20


class Reader:
    """Owns connections until ``place`` gets them, and those that are given back."""

    def __init__(
        self,
        poller: Poller,
        sockets: Sequence[socket.socket],
        request_seconds: float,
        place: Callable[[Client], None],
    ):
        """
        Args:
            request_seconds: a connection that sends nothing for so long is closed.
            place: gets each client of whose request enough is there.
        """
        self._poller = poller
        self._sockets = sockets
        self._place = place
        self._numbers = count(1)
        self._room = Room(MOST_BYTES)
        self._idle: Expiring[Client] = Expiring(request_seconds)
        self._heads: Expiring[Client] = Expiring(HEAD_SECONDS)
        self._bodies: Expiring[Client] = Expiring(BODY_SECONDS)
        self._accept_at: float | None = None
        self._log_at = 0.0

    @property
    def deadline(self) -> float | None:
        """When ``act`` has something to do."""
        waiting = (self._idle.deadline, self._heads.deadline, self._bodies.deadline)
        return min((at for at in (*waiting, self._accept_at) if at is not None), default=None)

    def open(self) -> None:
        """Accept connections from now on."""
        self._accept_at = None
        for listening in self._sockets:
            self._poller.add(listening, partial(self._accept, listening))

    def listen(self, client: Client) -> None:
        """Wait for a request."""
        self._idle.add(client)
        self._poller.add(client.socket, partial(self._read, client))

    def act(self) -> None:
        for client in self._idle.due():
            self._leave(client)
            client.close()
        for client in (*self._heads.due(), *self._bodies.due()):
            self._leave(client)
            self._place(client)
        if self._accept_at is not None and time.monotonic() >= self._accept_at:
            self.open()

    def drop(self) -> None:
        """Close this process's ends of all connections."""
        for client in (*self._idle, *self._heads, *self._bodies):
            client.close()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(MOST_ACCEPTED):
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if (now := time.monotonic()) >= self._log_at:
                        self._log_at = now + LOG_SECONDS
                        log.error("cannot accept connections, will keep trying: %s", error.strerror)
                    self._accept_at = now + ACCEPT_SECONDS
                    for other in self._sockets:
                        self._poller.remove(other)
                    return
                continue  # one broken connection
            connection.setblocking(False)
            client = Client(connection, next(self._numbers), self._room)
            self.listen(client)
            self._read(client)  # its request is there, most likely

    def _read(self, client: Client) -> None:
        try:
            data = client.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
            client.drop()
        if not data and not client.data:
            self._leave(client)
            client.close()
            return
        client.add(data)
        if not data or client.is_enough():
            self._leave(client)
            self._place(client)
        else:
            self._idle.discard(client)
            if client.head is None:
                self._heads.add(client)
            else:
                self._heads.discard(client)
                self._bodies.add(client)

    def _leave(self, client: Client) -> None:
        """Read no more of it."""
        for waiting in (self._idle, self._heads, self._bodies):
            waiting.discard(client)
        self._poller.remove(client.socket)
