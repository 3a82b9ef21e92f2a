"""Clients whose replica dies, by what was sent to them by then; and many that come at once."""

from __future__ import annotations

import os
import select
import socket
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import pytest

from asyncllm.supervise.child import received
from asyncllm.supervise.front.front import Front
from asyncllm.supervise.front.reader import BODY_BYTES, MOST_BYTES, MOST_PLACED
from asyncllm.supervise.front_channel import (
    BEGUN,
    CONTINUE,
    INLINE_BYTES,
    KEPT,
    NOWHERE,
    NUMBER_BYTES,
    FrontChannel,
    sent,
)
from asyncllm.supervise.poller import Expiring, Poller
from asyncllm.supervise.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.supervise.front_channel import HandedOver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")

REQUEST: Final = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
EXPECTING: Final = b"POST /generate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n"
HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST: Final = b"4\r\nlost\r\n0\r\n\r\n"


class Served:
    """A front with a port, and this process as its replicas."""

    def __init__(self, num_replicas: int):
        self.poller = Poller()
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        self.address = listening.getsockname()
        self.door = Front(
            self.poller,
            (listening,),
            lambda: 0.0,
            None,
            num_replicas=num_replicas,
            request_seconds=9.0,
            hosts=None,
        )
        self.door.open()
        self.servers = [Server(i) for i in range(num_replicas)]
        self.channels: list[FrontChannel] = []
        self._files: list[socket.socket] = [listening]
        for server in self.servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._files += ours, theirs
            server.began(os.getpid(), ours)
            self.door.began(server)
            server.accepts = server.is_ready = True
            self.channels.append(FrontChannel(theirs, bytes))

    def client(self, data: bytes) -> socket.socket:
        client = socket.create_connection(self.address, timeout=10)
        self._files.append(client)
        client.sendall(data)
        return client

    def turn(self) -> None:
        self.poller.wait(0.01)
        self.door.act()

    def taken(self, replica: int) -> HandedOver:
        """The request that this replica gets next."""
        for _ in range(1000):
            for one in self.channels[replica].handed_over():
                self._files.append(one.connection)
                return one
            self.turn()
        raise AssertionError("no request came")

    def dies(self, replica: int) -> None:
        """When what it has said has been read."""
        server = self.servers[replica]
        assert server.channel is not None
        for message, files in received(server.channel):
            self.door.said(server, message, files)
        server.ended()
        self.door.lost(server)

    def received(self, client: socket.socket) -> bytes:
        """All until the end."""
        found = b""
        while True:
            while not select.select([client], [], [], 0)[0]:
                self.turn()
            if not (more := client.recv(65536)):
                return found
            found += more

    def close(self) -> None:
        self.door.drop()
        self.poller.close()
        for file in self._files:
            file.close()


@contextmanager
def served(num_replicas: int) -> Iterator[Served]:
    front = Served(num_replicas)
    try:
        yield front
    finally:
        front.close()


def at(connection: socket.socket) -> bytes:
    return (sent(connection.fileno()) or 0).to_bytes(NUMBER_BYTES, "big")


@pytest.mark.parametrize("last_words", [b"", LAST])
@pytest.mark.parametrize("before", [b"", CONTINUE])
@pytest.mark.parametrize("written", [b"", HEAD])
def test_an_answer_that_had_begun(last_words: bytes, before: bytes, written: bytes) -> None:
    with served(1) as front:
        client = front.client(EXPECTING)
        number, connection, _ = front.taken(0)
        connection.sendall(before)
        front.channels[0].tell(BEGUN, number, at(connection) + last_words)
        connection.sendall(written)
        connection.close()
        front.dies(0)
        answer = front.received(client)
        assert answer.startswith(before + written)
        rest = answer.removeprefix(before + written)
        if written:
            assert rest == last_words
        else:
            assert rest.startswith(b"HTTP/1.1 503 ")


def test_nothing_is_answered_twice_when_the_replica_could_not_say_that_it_began() -> None:
    with served(2) as front:
        client = front.client(REQUEST)
        _, connection, _ = front.taken(0)
        connection.sendall(HEAD)
        connection.close()
        front.dies(0)
        assert front.received(client) == HEAD


@pytest.mark.parametrize(("request_bytes", "deaths"), [(REQUEST, 2), (EXPECTING, 1)])
def test_a_client_that_got_only_interim_responses_gets_an_answer(
    request_bytes: bytes, deaths: int
) -> None:
    """One has closed its side, and moves once; of the other, not all had come."""
    with served(2) as front:
        client = front.client(request_bytes)
        for replica in range(deaths):
            _, connection, _ = front.taken(replica)
            connection.sendall(CONTINUE)
            connection.close()
            front.dies(replica)
        answer = front.received(client)
        assert answer.replace(CONTINUE, b"").startswith(b"HTTP/1.1 503 ")


def test_a_kept_connection_whose_next_client_got_only_an_interim_response_gets_an_answer() -> None:
    with served(1) as front:
        client = front.client(REQUEST * 2)
        number, connection, _ = front.taken(0)
        connection.sendall(HEAD)
        front.channels[0].tell(KEPT, number, at(connection))
        connection.sendall(CONTINUE)
        connection.close()
        front.dies(0)
        assert front.received(client).startswith(HEAD + CONTINUE + b"HTTP/1.1 503 ")


def test_a_malformed_request_that_was_answered_is_not_answered_again() -> None:
    with served(2) as front:
        client = front.client(b"GET / HTTP/1.1\r\nno colon\r\n\r\n")
        _, connection, _ = front.taken(0)
        connection.sendall(HEAD)
        connection.close()
        front.dies(0)
        assert front.received(client) == HEAD


@pytest.mark.parametrize("num_written", [0, 1, None])
def test_a_connection_that_was_kept(num_written: int | None) -> None:
    """It may have the next request in it, unless the answer was the last; if it is all written."""
    with served(1) as front:
        client = front.client(REQUEST * 2)
        number, connection, _ = front.taken(0)
        connection.sendall(HEAD)
        place = int.from_bytes(at(connection), "big") + 1  # one byte was not sent yet
        at_next = NOWHERE if num_written is None else place.to_bytes(NUMBER_BYTES, "big")
        front.channels[0].tell(KEPT, number, at_next)
        connection.sendall(b"x" * (num_written or 0))
        connection.close()
        front.dies(0)
        answer = front.received(client)
        assert (b" 503 " in answer) == (num_written == 1)


def test_many_that_have_lost_their_replica_go_on_a_few_at_a_time() -> None:
    body = b"x" * (INLINE_BYTES + 1)
    request = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with served(2) as front:
        for _ in range(20):
            front.client(request)
        taken = [front.taken(i % 2) for i in range(20)]
        for one in taken[::2]:
            one.connection.close()
        front.dies(0)
        moved: list[HandedOver] = []
        while len(moved) < 10:
            front.turn()
            new = list(front.channels[1].handed_over())
            assert len(new) <= MOST_PLACED
            moved += new
        for one in moved:
            assert b"".join(one.pieces) == request
            one.connection.close()


def test_many_idle_connections_are_closed_a_few_at_a_time() -> None:
    idle = Expiring[int](0.0)
    for number in range(5):
        idle.add(number)
    assert [idle.due(2), idle.due(2), idle.due(2)] == [[0, 1], [2, 3], [4]]
    assert idle.deadline is None


def test_many_large_bodies_at_once_are_read_a_piece_in_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a probe waits for one piece of one of them, however many there are."""
    for name in ("BODY_SECONDS", "PART_SECONDS"):  # their rest is waited for
        monkeypatch.setattr(f"asyncllm.supervise.front.reader.{name}", 60.0)
    body = b"x" * MOST_BYTES
    with served(1) as front:
        reader = front.door._reader
        head = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        unsent = {front.client(head): body for _ in range(12)}
        while len(reader._bodies) < len(unsent):
            front.turn()
        num_taken = 0
        while num_taken < len(unsent):
            for client, rest in unsent.items():
                client.setblocking(False)
                with suppress(BlockingIOError):
                    unsent[client] = rest[client.send(rest) :]
            before = reader._room.left
            front.turn()
            assert before - reader._room.left <= BODY_BYTES
            new = list(front.channels[0].handed_over())
            assert len(new) <= 1
            for one in new:
                one.connection.close()
            num_taken += len(new)
