"""Front: accepts connections, and gives each request to a replica, with the socket.

Streams go from the replica to the client directly. When a replica has answered, the connection
comes back, so that its next request may go to another one.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

from asyncllm.front import metrics
from asyncllm.front.answers import Answer, as_bytes, first, merger
from asyncllm.front.blocks import blocks, prompt_bytes
from asyncllm.front.client import Client, Room
from asyncllm.front.everyone import Everyone
from asyncllm.front.expiring import Expiring
from asyncllm.front.replica import Parcel, Replica, able
from asyncllm.front.request import home_of
from asyncllm.front.router import Router
from asyncllm.supervise.child import ACCEPT, PING, READY
from asyncllm.supervise.front_channel import (
    BEGUN,
    CLOSED,
    FREE,
    KEPT,
    MOVED,
    NUMBER_BYTES,
    RETRY_SECONDS,
    number_of,
)
from asyncllm.supervise.listening import url_of
from asyncllm.supervise.outage import STARTING, Outage
from asyncllm.supervise.standard_files import announce

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncllm.supervise.poller import Poller
    from asyncllm.supervise.server import Server

log = logging.getLogger(__name__)

#: The rest of a body is waited for so long; then its beginning decides.
BODY_SECONDS: Final = 2.0
PING_SECONDS: Final = 1.0
#: Without file descriptors: before accepting again, and how often the log says so.
ACCEPT_SECONDS, LOG_SECONDS = 0.1, 60.0
#: Connections accepted, and bytes read, at once.
MOST_ACCEPTED: Final = 128
READ_BYTES: Final = 2**18
#: Of requests that are read or wait for their answer; beyond, none is read to its end, or moves.
MOST_BYTES: Final = 256 * 2**20


class Front:
    """The door of a supervisor with several servers."""

    def __init__(
        self,
        poller: Poller,
        sockets: Sequence[socket.socket],
        retry_seconds: Callable[[], float],
        tls: tuple[str, str] | None,
        *,
        num_replicas: int,
        request_seconds: float,
    ):
        """
        Args:
            retry_seconds: when a client may try again while there is no replica.
            tls: not supported: None.
            request_seconds: a connection without a whole request head is closed after this.
        """
        self._poller = poller
        self._sockets = sockets
        self._replicas = [Replica() for _ in range(num_replicas)]
        self._router = Router(num_replicas)
        self._everyone = Everyone(poller)
        self._totals = metrics.Totals(num_replicas)
        self._own = metrics.Own()
        # It accepts nothing itself.
        self._outage = Outage(poller, (), retry_seconds)
        self._numbers = count(1)
        self._room = Room(MOST_BYTES)
        self._idle: Expiring[Client] = Expiring(request_seconds)
        self._reading: Expiring[Client] = Expiring(BODY_SECONDS)
        self._handed: dict[int, Client] = {}
        self._asking: set[Client] = set()
        self._ping_at = 0.0
        self._accept_at: float | None = None
        self._log_at = 0.0
        self._is_announced = False

    # -- as the supervisor sees it ---------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        times = [self._idle.deadline, self._reading.deadline, self._everyone.deadline]
        times += [self._outage.deadline, self._ping_at, self._accept_at]
        if any(replica.is_behind for replica in self._replicas):
            times.append(time.monotonic() + RETRY_SECONDS)
        return min((at for at in times if at is not None), default=None)

    def open(self) -> None:
        self._accept_at = None
        for listening in self._sockets:
            self._poller.add(listening, partial(self._accept, listening))

    def began(self, server: Server) -> None:
        self._replicas[server.index].began(server)

    def said(self, server: Server, message: bytes, files: list[int]) -> None:
        replica, kind = self._replicas[server.index], message[:1]
        if message == ACCEPT:
            server.tell(ACCEPT)
        elif kind == READY:
            self._announce(replica, server.index, message[1:].decode("utf-8", "replace"))
        elif kind == PING:
            replica.answered()
        elif (client := self._handed.get(number_of(message))) is not None:
            self._reported(client, kind, message[1 + NUMBER_BYTES :])

    def lost(self, server: Server) -> None:
        self._replicas[server.index].lost()
        self._router.forget(server.index)
        self._totals.lost(server.index)
        self._own.deaths += 1
        there = [c for c in self._handed.values() if c.placed and c.placed.replica == server.index]
        for client in there:
            self._take_back(client)
            if not client.has_begun:
                self._move(client)
            elif client.last_words:
                self._finish(client, client.last_words)
            else:
                client.close()

    def act(self) -> None:
        now = time.monotonic()
        for client in self._idle.due():
            self._close(client)
        for client in self._reading.due():
            self._place(client)
        self._everyone.expire()
        self._outage.expire()
        if self._accept_at is not None and now >= self._accept_at:
            self.open()
        for replica in self._replicas:
            replica.flush()
        if now >= self._ping_at:
            self._ping_at = now + PING_SECONDS
            for replica in self._replicas:
                replica.ping()

    def drop(self) -> None:
        self._outage.drop()
        self._everyone.drop()
        for replica in self._replicas:
            replica.lost()
        for client in (*self._idle, *self._reading, *self._handed.values(), *self._asking):
            client.close()

    # -- reading requests ------------------------------------------------------------------------

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
            self._listen(client)
            self._read(client)  # its request is there, most likely

    def _listen(self, client: Client) -> None:
        """Wait for a request."""
        self._idle.add(client)
        self._poller.add(client.socket, partial(self._read, client))

    def _read(self, client: Client) -> None:
        try:
            data = client.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(client)
            return
        client.add(data)
        if client.is_enough():
            self._place(client)
        elif client.head is not None:
            self._idle.discard(client)
            self._reading.add(client)

    def _leave(self, client: Client) -> None:
        """Read no more of it."""
        self._idle.discard(client)
        self._reading.discard(client)
        self._poller.remove(client.socket)

    def _close(self, client: Client) -> None:
        self._leave(client)
        client.close()

    def _finish(self, client: Client, last: bytes | None = None, why: str = STARTING) -> None:
        """Write this, or ``why`` no replica answers, and close the connection."""
        client.drop()
        if last is None:
            self._outage.refuse(client.socket, why)
        else:
            self._outage.finish(client.socket, last)

    # -- choosing a replica ----------------------------------------------------------------------

    def _place(self, client: Client, *, besides: int | None = None) -> None:
        """Give a request to a replica, or ask all of them.

        Args:
            besides: a replica that must not get it.
        """
        self._leave(client)
        head = client.head
        merge = None if head is None else self._merger(head.method, head.path)
        among = [i for i, replica in enumerate(self._replicas) if replica.is_ready and i != besides]
        among = among or able(self._replicas)
        if not among:
            self._finish(client)
        elif merge is not None and client.is_whole():
            self._asking.add(client)
            self._everyone.ask(self._replicas, client.data, partial(self._answer, client, merge))
        else:
            prompt = prompt_bytes(client.body)
            home = None if head is None else home_of(head.path, client.body)
            if home in among:
                among = [home]
            client.placed = self._router.place(blocks(prompt), len(prompt), among)
            self._handed[client.number] = client
            parcel = Parcel(client.number, client.socket, client.data)
            self._replicas[client.placed.replica].hand_over(parcel)
            if self._room.left < 0:
                client.drop()

    def _merger(
        self, method: str, path: str
    ) -> Callable[[Sequence[Answer | None]], Answer | None] | None:
        if path == "/metrics" and method in ("GET", "HEAD"):
            return self._merge_metrics
        return merger(method, path)

    def _merge_metrics(self, answers: Sequence[Answer | None]) -> Answer | None:
        if (found := first(answers)) is None or found.status != 200:
            return found
        pages = [None if answer is None else answer.body.decode() for answer in answers]
        self._own.ready = sum(replica.is_ready for replica in self._replicas)
        text = self._own.page() + self._totals.merged(pages)
        return found._replace(body=text.encode())

    def _answer(
        self,
        client: Client,
        merge: Callable[[Sequence[Answer | None]], Answer | None],
        answers: list[Answer | None],
    ) -> None:
        self._asking.discard(client)
        answer, head = merge(answers), client.head
        if answer is None or head is None:
            self._finish(client)
            return
        data = as_bytes(answer, with_body=head.method != "HEAD", is_last=head.is_last)
        try:
            sent = client.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            client.close()
            return
        if sent < len(data) or head.is_last:
            self._finish(client, data[sent:])
        else:
            client.reset()
            self._listen(client)

    # -- what replicas say of connections --------------------------------------------------------

    def _reported(self, client: Client, kind: bytes, more: bytes) -> None:
        if kind == BEGUN:
            client.has_begun, client.last_words = True, more
            client.drop()
        elif kind == KEPT:
            client.has_begun, client.last_words = True, b""
            client.drop()
            if client.placed is not None:
                self._router.ended(client.placed)
                client.placed = client.placed._replace(work=0.0)
        elif kind == FREE:
            self._take_back(client)
            client.reset()
            self._listen(client)
        elif kind == CLOSED:
            self._take_back(client)
            client.close()
        elif kind == MOVED:
            self._take_back(client)
            self._move(client)

    def _take_back(self, client: Client) -> None:
        """The replica has left it."""
        del self._handed[client.number]
        if client.placed is not None:
            self._router.ended(client.placed)

    def _move(self, client: Client) -> None:
        """Give a request to another replica; only once, as it may be what kills them."""
        if client.has_moved or not client.is_whole():
            self._finish(client, why="the replica that was to answer has died; try again")
            return
        client.has_moved = True
        self._own.moved += 1
        self._place(client, besides=client.placed.replica if client.placed else None)

    def _announce(self, replica: Replica, index: int, about: str) -> None:
        replica.about = about
        log.info("replica %d is ready (%s)", index, about)
        if self._is_announced or not all(other.is_ready for other in self._replicas):
            return
        self._is_announced = True
        host, port, *_ = self._sockets[0].getsockname()
        what = f"{len(self._replicas)} replicas, each with {about}"
        announce(f"asyncllm is ready on {url_of(host, port)} ({what})")
