"""Requests between two servers: whoever has them last answers them."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from asyncllm.supervise.child import HAND_OVER, TAKEN, Parent, received, send
from asyncllm.supervise.door import SingleDoor
from asyncllm.supervise.poller import Poller
from asyncllm.supervise.server import Server
from tests.support.server.files import only

if TYPE_CHECKING:
    from collections.abc import Iterator


class Between:
    """A parent's door, and a server that comes and goes."""

    def __init__(self, stack: ExitStack):
        self._stack = stack
        self._poller = Poller()
        stack.callback(self._poller.close)
        self.door = SingleDoor(self._poller, (), lambda: 0.0, None)
        stack.callback(self.door.drop)
        self.server = Server(0)
        stack.callback(self.server.ended)
        self.clients: list[socket.socket] = []

    def start(self) -> Parent:
        """A server that is ready; its side of the channel."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._stack.enter_context(theirs)
        self.server.began(0, ours)
        self.door.began(self.server)
        self.server.is_ready = True
        return Parent((), theirs)

    def end(self) -> None:
        """The server has ended; what it said before is heard."""
        self.hear()
        self.server.ended()
        self.door.lost(self.server)

    def hear(self) -> None:
        assert self.server.channel is not None
        for message, files in received(self.server.channel):
            self.door.said(self.server, message, files)

    def hold(self, request: bytes) -> None:
        """A connection whose request no server has answered."""
        ours, client = socket.socketpair()
        client.settimeout(20)
        self.clients.append(self._stack.enter_context(client))
        file = os.memfd_create("request")
        os.write(file, request)
        self.door.said(self.server, b"h", [ours.detach(), file])
        self.server.is_ready = True

    def said(self, index: int) -> bytes:
        return self.clients[index].recv(1000)


@pytest.fixture
def between() -> Iterator[Between]:
    with ExitStack() as stack:
        yield Between(stack)


def test_what_a_server_has_not_taken_is_for_the_next_one(between: Between) -> None:
    server = between.start()
    for request in (b"0", b"1", b"2"):
        between.hold(request)
    between.door.act()
    connection, request = next(server.handed_over())  # it ends before it asks for the next one
    assert request == b"0"
    connection.close()
    server.close()
    between.end()
    other = between.start()
    between.door.act()
    found = list(other.handed_over())
    assert [request for _, request in found] == [b"0", b"1", b"2"]
    for number, (connection, _) in enumerate(found):
        connection.sendall(b"answer")
        connection.close()
        assert between.said(number) == b"answer"
    before = len(os.listdir("/proc/self/fd"))
    between.hear()
    assert len(os.listdir("/proc/self/fd")) == before - 6, "the parent's ends are closed"
    assert between.said(0) == b""
    between.end()
    assert between.door.deadline is None


def test_what_a_server_cannot_take_is_refused(between: Between) -> None:
    server = between.start()
    between.hold(b"0")
    between.hold(b"1")
    between.door.act()
    with only(1):
        taken = list(server.handed_over())
    assert taken == []
    between.hear()
    for index in (0, 1):
        assert between.said(index).startswith(b"HTTP/1.1 503 ")


def test_messages_of_what_was_taken(between: Between) -> None:
    server = between.start()
    between.hold(b"0")
    between.door.act()
    for connection, _ in server.handed_over():
        connection.close()
    assert between.server.channel is not None
    assert between.server.channel.recv(10) == TAKEN


def test_the_last_words_of_a_server_that_has_not_heard_everything(between: Between) -> None:
    """The system then says first that the connection was reset."""
    server = between.start()
    between.hold(b"0")
    between.door.act()
    ours, client = socket.socketpair()
    with client, os.fdopen(os.memfd_create("request"), "wb") as file:
        client.settimeout(20)
        send(server.channel, HAND_OVER, [ours.fileno(), file.fileno()])
        ours.close()
        server.close()
        between.end()
        other = between.start()
        between.door.act()
        for connection, _ in other.handed_over():
            connection.sendall(b"answer")
            connection.close()
        assert client.recv(10) == between.said(0) == b"answer"


@pytest.mark.parametrize("is_given", [True, False])
def test_without_a_next_server_they_are_refused(between: Between, is_given: bool) -> None:
    if is_given:
        between.start()
    between.hold(b"0")
    if is_given:
        between.door.act()
        between.end()
    between.door.give_up()
    assert between.said(0).startswith(b"HTTP/1.1 503 ")
    assert between.said(0) == b""


def test_an_idle_connection_gets_an_answer_when_it_asks(between: Between) -> None:
    ours, client = socket.socketpair()
    with client:
        client.settimeout(20)
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        between.door.said(between.server, b"h", [ours.detach()])
        assert client.recv(1000).startswith(b"HTTP/1.1 503 ")


def test_the_oldest_are_refused_when_files_are_few(between: Between) -> None:
    with only(40):
        limited = SingleDoor(between._poller, (), lambda: 0.0, None)
        between.door = limited
        for number in range(12):
            between.hold(b"%d" % number)
    refused = []
    for index, client in enumerate(between.clients):
        client.setblocking(False)
        try:
            assert client.recv(1000).startswith(b"HTTP/1.1 503 ")
            refused.append(index)
        except BlockingIOError:
            break
    assert refused == list(range(len(refused)))
    assert 0 < len(refused) < 12
    limited.drop()
