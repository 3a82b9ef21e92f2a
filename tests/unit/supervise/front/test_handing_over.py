"""A front and a replica that dies, or has no file descriptors left, at the wrong moment."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from asyncllm.supervise.child import ACCEPT, MESSAGE_BYTES
from asyncllm.supervise.crowd import Use
from asyncllm.supervise.door import SingleDoor
from asyncllm.supervise.front.front import Front
from asyncllm.supervise.front.hosts import Hosts
from asyncllm.supervise.front.reader import HEAD_SECONDS, Client, Room
from asyncllm.supervise.front.replica import Parcel, Replica
from asyncllm.supervise.front_channel import INLINE_BYTES, MOVED, FrontChannel, numbered
from asyncllm.supervise.poller import Poller
from asyncllm.supervise.server import Server
from asyncllm.supervise.supervisor import Supervisor
from tests.support.server.files import only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncllm.supervise.front.answers import Answer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")


@contextmanager
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_server_that_dies_while_it_waits_for_a_word(num_servers: int) -> None:
    poller, server = Poller(), Server(0)
    door = SingleDoor(poller, (), lambda: 0.0, None) if num_servers == 1 else front(poller)
    with channel() as (ours, theirs):
        server.began(1, ours)
        door.began(server)
        theirs.close()
        door.said(server, ACCEPT, [])
        door.drop()
    poller.close()


def front(poller: Poller) -> Front:
    hosts = Hosts(("llm.example.org",))
    return Front(poller, (), lambda: 0.0, None, num_replicas=2, request_seconds=5.0, hosts=hosts)


@contextmanager
def ready() -> Iterator[tuple[Poller, Front, socket.socket]]:
    """A front with one replica that takes requests, and the replica's end of their channel."""
    poller, server = Poller(), Server(0)
    door = front(poller)
    with channel() as (ours, there):
        server.began(os.getpid(), ours)
        door.began(server)
        server.accepts = server.is_ready = True
        yield poller, door, there
        door.drop()
    poller.close()


@contextmanager
def arrived() -> Iterator[tuple[Client, socket.socket]]:
    """A connection that was accepted, and its client's end."""
    connection, client = socket.socketpair()
    connection.setblocking(False)
    with client:
        yield Client(connection, 1, Room(1000)), client


@pytest.mark.parametrize(
    ("num_bytes", "free"), [(10, 0), (INLINE_BYTES + 1, 0), (INLINE_BYTES + 1, 1)]
)
def test_a_replica_without_free_files_gives_requests_back(num_bytes: int, free: int) -> None:
    replica, server = Replica(), Server(0)
    connection, client = socket.socketpair()
    with connection, client, channel() as (ours, theirs):
        server.began(1, ours)
        replica.began(server)
        replica.hand_over(Parcel(7, connection, b"x" * num_bytes))
        there = FrontChannel(theirs, bytes)
        with only(free):
            assert not list(there.handed_over())
        assert ours.recv(MESSAGE_BYTES) == numbered(MOVED, 7)
        before = len(os.listdir("/proc/self/fd"))
        replica.hand_over(Parcel(8, connection, b"y" * num_bytes, num_first=3))
        [(number, taken, pieces)] = there.handed_over()
        assert (number, pieces) == (8, (b"yyy", b"y" * (num_bytes - 3)))
        taken.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_when_all_replicas_are_busy_one_of_them_answers_late() -> None:
    """A 503 would be wrong: nothing is starting, and nobody else can answer sooner."""
    poller, servers = Poller(), [Server(0), Server(1)]
    door = front(poller)
    with channel() as (ours, there), channel() as (our_other, _):
        for server, end in zip(servers, (ours, our_other), strict=True):
            end.setblocking(False)
            server.began(os.getpid(), end)
            door.began(server)
            server.accepts = server.is_ready = True
            for _ in range(9):  # to which nobody answers
                door._replicas[server.index].ping()
        connection, client = socket.socketpair()
        connection.setblocking(False)
        taker = Client(connection, 1, Room(1000))
        with client:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            door._reader.listen(taker)
            door._reader._read(taker)
            [(number, taken, _)] = FrontChannel(there, bytes).handed_over()
            taken.close()
            assert number == 1
            assert door._replicas[0].accepts is False
            door.drop()
    poller.close()


def test_a_replica_that_comes_while_all_reload_is_asked_too() -> None:
    poller, servers = Poller(), [Server(0), Server(1)]
    door = front(poller)
    told: list[Answer | None] = []
    with channel() as (ours, there), channel() as (our_other, other):
        for server, end in zip(servers, (ours, our_other), strict=True):
            end.setblocking(False)
            server.began(os.getpid(), end)
            door.began(server)
        servers[0].accepts = True
        door._broadcast.ask("reload", b"request", told.append)
        door._broadcast.ask("metrics", b"another", lambda answer: None)
        servers[1].accepts = True
        door.said(servers[1], ACCEPT, [])
        assert other.recv(MESSAGE_BYTES) == ACCEPT
        first, another = FrontChannel(there, bytes).handed_over()
        another.connection.close()
        [second] = FrontChannel(other, bytes).handed_over()
        for _, connection, pieces in (first, second):
            assert pieces == (b"", b"request")
            poller.wait(0.0)
            assert told == []
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            connection.close()
        while not told:
            poller.wait(1.0)
        assert told[0] is not None
        assert told[0].status == 200
        door.drop()
    poller.close()


@pytest.mark.parametrize(
    ("host", "is_asked"), [("llm.example.org:80", True), ("evil.example.org", False)]
)
def test_a_probe_by_a_strangers_name_is_a_replicas_to_refuse(host: str, is_asked: bool) -> None:
    """The front would answer for a replica that is late, and admit it."""
    with ready() as (_, door, there), arrived() as (taker, client):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: %b\r\n\r\n" % host.encode())
        door._reader._read(taker)
        [(number, taken, _)] = FrontChannel(there, bytes).handed_over()
        taken.close()
        assert number == (0 if is_asked else 1)


@pytest.mark.parametrize("then", [b"", b"EOF", b"\0"])
def test_what_is_no_whole_head_goes_to_a_replica_soon(then: bytes) -> None:
    """At once if nothing can follow; it gets the pieces as they came."""
    with ready() as (poller, door, there), arrived() as (taker, client):
        door._reader.listen(taker)
        start = b"GET /health HTTP/1.1\r\nHost: x\r\n"
        client.sendall(start if then != b"\0" else then)
        door._reader._read(taker)
        if then == b"":
            assert list(FrontChannel(there, bytes).handed_over()) == []
            poller.wait(HEAD_SECONDS + 0.01)  # nothing comes
            door.act()
        elif then == b"EOF":
            client.shutdown(socket.SHUT_WR)
            door._reader._read(taker)
        [(_, taken, pieces)] = FrontChannel(there, bytes).handed_over()
        taken.close()
        assert b"".join(pieces) == (start if then != b"\0" else then)


@pytest.mark.parametrize(
    "data", [b"GET /hea", b"POST /generate HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]
)
def test_in_a_crowd_no_request_is_waited_for(data: bytes) -> None:
    """It is refused, so that the next connection can be looked at: it may be a probe."""
    with ready() as (poller, door, _), arrived() as (taker, client):
        taker.use = Use.PROBING
        client.setblocking(False)
        client.sendall(data)
        door._reader.listen(taker)
        door._reader._read(taker)
        if data.startswith(b"GET"):
            poller.wait(HEAD_SECONDS + 0.01)  # nothing comes
            door.act()
            assert b" 503 " in client.recv(20)
            assert taker.socket.fileno() == -1
        else:
            assert b" 503 " in client.recv(20)


def test_a_start_without_free_files_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor((), 1.0, num_servers=2, make_door=make_door)
    [server, _] = supervisor._servers
    with only(1):
        assert supervisor._start(server) is None
    assert server.pid is None
    assert server.start_at is not None
    assert "cannot start replica 0, will keep trying" in caplog.text
    supervisor._close()


def make_door(
    poller: Poller,
    sockets: Sequence[socket.socket],
    retry_seconds: Callable[[], float],
    tls: tuple[str, str] | None,
) -> Front:
    return front(poller)
