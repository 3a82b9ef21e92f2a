"""Front: accepts connections, and gives each request to a replica, with the socket.

Streams go from the replica to the client directly. When a replica has answered, the connection
comes back, so that its next request may go to another one.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from asyncllm.errors import AsyncLLMError, NotReady
from asyncllm.supervise import front_channel as channel
from asyncllm.supervise.child import ACCEPT, LEAVING, PING, READY, content_of
from asyncllm.supervise.crowd import Use
from asyncllm.supervise.front.answers import Answer, as_bytes
from asyncllm.supervise.front.broadcast import Broadcast
from asyncllm.supervise.front.hosts import Hosts
from asyncllm.supervise.front.reader import MOST_PLACED, Client, Reader
from asyncllm.supervise.front.replica import Parcel, Replica, able
from asyncllm.supervise.front.request import closing, home_of
from asyncllm.supervise.front.router import Router, blocks, prompt_bytes
from asyncllm.supervise.listening import url_of
from asyncllm.supervise.outage import STARTING, Outage
from asyncllm.supervise.poller import Poller
from asyncllm.supervise.server import Server
from asyncllm.supervise.standard_files import announce

log = logging.getLogger(__name__)

PING_SECONDS: Final = 1.0

DIED: Final = NotReady("the replica that was to answer has died; try again")


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
        hosts: Hosts | None,
    ):
        """
        Args:
            retry_seconds: when a client may try again while there is no replica.
            tls: not supported: None.
            request_seconds: a connection without a whole request head is closed after this.
            hosts: by which replicas may be called; None if they answer to any.
        """
        self._poller = poller
        self._hosts = hosts
        self._sockets = sockets
        self._replicas = [Replica() for _ in range(num_replicas)]
        self._router = Router(num_replicas)
        self._broadcast = Broadcast(poller, self._replicas)
        # It accepts nothing itself.
        self._outage = Outage(poller, (), retry_seconds)
        self._reader = Reader(poller, sockets, request_seconds, self._place)
        self._handed: dict[int, Client] = {}
        self._asking: set[Client] = set()
        # Those that the replica has left that was to answer them, as it has died.
        self._left: deque[Client] = deque()
        self._ping_at = 0.0
        self._is_announced = False

    # -- as the supervisor sees it ---------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        times = [self._reader.deadline, self._broadcast.deadline, self._outage.deadline]
        times.append(0.0 if self._left else self._ping_at)
        if any(replica.is_behind for replica in self._replicas):
            times.append(time.monotonic() + channel.RETRY_SECONDS)
        return min((at for at in times if at is not None), default=None)

    def open(self) -> None:
        self._reader.open()

    def began(self, server: Server) -> None:
        self._replicas[server.index].began(server)

    def said(self, server: Server, message: bytes, files: list[int]) -> None:
        replica, kind = self._replicas[server.index], message[:1]
        if message == ACCEPT:
            server.tell(ACCEPT)
            replica.ping()
            self._broadcast.joins(server.index)
        elif kind == READY:
            replica.ping()
            self._announce(server.index, message[1:].decode("utf-8", "replace"))
        elif message == LEAVING:
            replica.leaves = True
        elif kind == PING:
            replica.answered(message[1:])
        elif kind == channel.ASK and files:
            what, _, request = message[1:].partition(b"\n")
            self._ask(what.decode(), socket.socket(fileno=files.pop(0)), _with(request, files))
        else:
            more = _with(message[1 + channel.NUMBER_BYTES :], files)
            if (client := self._handed.get(channel.number_of(message))) is not None:
                self._reported(client, kind, more)

    def lost(self, server: Server) -> None:
        self._replicas[server.index].lost()
        self._router.forget(server.index)
        self._broadcast.lost(server.index)
        there = [c for c in self._handed.values() if c.placed and c.placed.replica == server.index]
        for client in there:
            self._take_back(client)
        self._left.extend(there)

    def act(self) -> None:
        now = time.monotonic()
        for client in [self._left.popleft() for _ in range(min(MOST_PLACED, len(self._left)))]:
            self._go_on(client)
        placed = len(self._handed) + len(self._asking) + len(self._left)
        self._broadcast.own.connections = self._reader.num_clients + placed
        self._reader.act()
        self._broadcast.expire()
        self._outage.expire()
        for replica in self._replicas:
            replica.flush()
        if now >= self._ping_at:
            self._ping_at = now + PING_SECONDS
            for replica in self._replicas:
                replica.ping()

    def give_up(self) -> None:
        """Each client was told when its replica was lost."""

    def drop(self) -> None:
        self._outage.drop()
        self._broadcast.drop()
        for replica in self._replicas:
            replica.lost()
        self._reader.drop()
        for client in (*self._handed.values(), *self._asking, *self._left):
            client.close()

    # -- choosing a replica ----------------------------------------------------------------------

    def _refuse(
        self, client: Client, why: AsyncLLMError = STARTING, *, at_once: bool = False
    ) -> None:
        """No replica answers: say so, and close the connection; see ``Outage.refuse``."""
        client.drop()
        self._outage.refuse(client.socket, why, at_once=at_once)

    def _finish(self, client: Client, last: bytes) -> None:
        """Write this, and close the connection."""
        client.drop()
        self._outage.finish(client.socket, last)

    def _place(self, client: Client, *, besides: int | None = None) -> None:
        """Give a request to a replica, or ask all of them.

        Args:
            besides: a replica that must not get it.
        """
        if (crowded := self._reader.refusal(client)) is not None:
            self._refuse(client, crowded, at_once=client.head is None)
            return
        among = [i for i, replica in enumerate(self._replicas) if replica.is_ready and i != besides]
        among = among or able(self._replicas)
        if not among:
            self._refuse(client)
        elif client.probe and self._is_called(client):
            self._asking.add(client)
            request = closing(bytes(client.data))
            self._broadcast.ask(client.probe, request, partial(self._answer_probe, client))
        else:
            home = None if client.head is None else home_of(client.head.path, client.body)
            self._hand_over(client, [home] if home in among else among)

    def _is_called(self, client: Client) -> bool:
        """Whether no replica would refuse the host, of a probe."""
        return self._hosts is None or client.head is None or client.head.host in self._hosts

    def _hand_over(self, client: Client, among: Collection[int]) -> None:
        """Give the request to one of these replicas."""
        prompt = prompt_bytes(client.body)
        client.placed = self._router.place(blocks(prompt), len(prompt), among)
        self._handed[client.number] = client
        client.begins_at = channel.sent(client.socket.fileno()) or 0
        parcel = Parcel(client.number, client.socket, bytes(client.data), client.num_first)
        self._replicas[client.placed.replica].hand_over(parcel)
        if client.room.left < 0:
            client.drop()

    def _answer_probe(self, client: Client, answer: Answer | None) -> None:
        self._asking.discard(client)
        head = client.head
        if answer is None or head is None:
            self._refuse(client)
            return
        is_head = client.data.startswith(b"HEAD ")
        is_last = head.is_last or client.use is not Use.FREELY
        data = as_bytes(answer, with_body=not is_head, is_last=is_last, version=head.version)
        try:
            num_sent = client.socket.send(data)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            client.close()
            return
        if num_sent < len(data) or is_last:
            self._finish(client, data[num_sent:])
        else:
            client.reset()
            self._reader.listen(client)

    def _ask(self, what: str, connection: socket.socket, request: bytes) -> None:
        """Ask all replicas for one of them."""

        def answer(found: Answer | None) -> None:
            if found is None:
                self._outage.refuse(connection)
            else:
                self._outage.finish(connection, as_bytes(found, is_last=True))

        if request:
            self._broadcast.ask(what, request, answer)
        else:  # its file is lost: this process has too many
            answer(None)

    # -- what replicas say of connections --------------------------------------------------------

    def _reported(self, client: Client, kind: bytes, more: bytes) -> None:
        if kind in (channel.BEGUN, channel.KEPT):
            client.has_begun, client.last_words = True, more[channel.NUMBER_BYTES :]
            client.begins_at = int.from_bytes(more[: channel.NUMBER_BYTES], "big")
            client.drop()
            if kind == channel.KEPT and client.placed is not None:
                self._router.ended(client.placed)
                client.placed = client.placed._replace(work=0.0)
        elif kind == channel.FREE:
            self._take_back(client)
            client.reset()
            self._reader.listen(client)
        elif kind == channel.CLOSED:
            self._take_back(client)
            client.close()
        elif kind == channel.MOVED:
            self._take_back(client)
            self._move(client)
        elif kind == channel.HOME:
            self._take_back(client)
            self._go_home(client, more[0], more[1:])

    def _take_back(self, client: Client) -> None:
        """The replica has left it."""
        del self._handed[client.number]
        if client.placed is not None:
            self._router.ended(client.placed)

    def _go_on(self, client: Client) -> None:
        """Its replica has died. The client gets one whole answer, if nothing of one is sent."""
        at = channel.sent(client.socket.fileno())
        if not client.has_begun:
            if at is None or channel.is_interim(at - client.begins_at):
                self._move(client)
            else:  # the replica had no time to say that its answer begins
                client.close()
        elif at is not None and channel.is_interim(at - client.begins_at):
            self._refuse(client, DIED)
        elif client.last_words and (at is None or at > client.begins_at):
            self._finish(client, client.last_words)
        else:
            client.close()

    def _move(self, client: Client) -> None:
        """Give a request to another replica; only once, as it may be what kills them."""
        if client.has_moved or not client.is_whole():
            self._refuse(client, DIED)
            return
        client.has_moved = True
        self._broadcast.own.moved += 1
        self._place(client, besides=client.placed.replica if client.placed else None)

    def _go_home(self, client: Client, home: int, first: bytes) -> None:
        """Give a request to the replica that has what it names.

        Args:
            first: the length of the request, and it, with what has come after it.
        """
        client.reset()
        client.add(first[channel.FIRST_BYTES :])
        client.num_first = int.from_bytes(first[: channel.FIRST_BYTES], "big")
        if self._replicas[home].is_stopped:
            self._refuse(client, NotReady(f"replica {home}, which is asked for, is stopped"))
        elif client.data and self._replicas[home].is_there:
            self._hand_over(client, [home])
        else:
            self._refuse(client, DIED)

    def _announce(self, index: int, about: str) -> None:
        log.info("replica %d is ready (%s)", index, about)
        if self._is_announced or not all(other.is_ready for other in self._replicas):
            return
        self._is_announced = True
        host, port, *_ = self._sockets[0].getsockname()
        what = f"{len(self._replicas)} replicas, each with {about}"
        announce(f"asyncllm is ready on {url_of(host, port)} ({what})")


def _with(start: bytes, files: list[int]) -> bytes:
    """What a message has after its kind, with what it has in a file; closes that."""
    for file in files:
        start += content_of(file)
        os.close(file)
    return start
