"""Messages between machines: pieces, strangers, and a side that stops or leaves."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest

from asyncllm.wire import tcp
from asyncllm.wire.tcp import TOKEN_BYTES, TcpLink, accept, connect, listen

TOKEN = secrets.token_bytes(TOKEN_BYTES)
HOST = "127.0.0.1"


@pytest.fixture
def ends() -> Iterator[tuple[TcpLink, TcpLink]]:
    """The two ends of a connection."""
    with listen(HOST) as listening, ThreadPoolExecutor(1) as threads, ExitStack() as opened:
        accepted = threads.submit(accept, listening, TOKEN)
        ours = opened.enter_context(closing(connect(listening.getsockname(), TOKEN)))
        yield ours, opened.enter_context(closing(accepted.result()))


def raw_end() -> tuple[TcpLink, socket.socket]:
    """A link, and the socket at its other end."""
    with listen(HOST) as listening:
        other = socket.create_connection(listening.getsockname())
        return TcpLink(listening.accept()[0]), other


def test_messages_arrive_in_order_and_whole(ends: tuple[TcpLink, TcpLink]) -> None:
    ours, theirs = ends
    large = secrets.token_bytes(5_000_000)

    def send() -> None:
        for message in (b"", b"a", large):
            ours.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    assert [theirs.receive() for _ in range(3)] == [b"", b"a", large]
    sender.join()
    ours.finish()
    assert theirs.receive() is None
    theirs.send(b"still")
    assert ours.receive() == b"still"


def test_pieces_become_messages() -> None:
    link, other = raw_end()
    data = b"".join(struct.pack("<Q", len(each)) + each for each in (b"one", b"", b"three"))
    with closing(link), other:
        for i in range(len(data) - 1):
            other.sendall(data[i : i + 1])
        assert link.receive() == b"one"
        assert link.receive() == b""
        with pytest.raises(TimeoutError):  # and what has come is kept
            link.receive(0.01)
        other.sendall(data[-1:])
        assert link.receive() == b"three"


def test_a_side_that_says_nothing(ends: tuple[TcpLink, TcpLink]) -> None:
    with pytest.raises(TimeoutError):
        ends[0].receive(0.05)


def test_a_side_that_is_killed_within_a_message() -> None:
    link, other = raw_end()
    with closing(link):
        other.sendall(struct.pack("<Q", 100) + b"begun")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()  # with a reset
        assert link.receive() is None
        for _ in range(3):
            link.send(b"nobody reads it")


def test_a_send_that_waits_gives_up() -> None:
    link, other = raw_end()
    with closing(link), other:
        sender = threading.Thread(target=link.send, args=(bytes(50_000_000),))
        sender.start()
        sender.join(0.2)
        assert sender.is_alive()
        link.finish()
        sender.join(20)
        assert not sender.is_alive()


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "TOKEN_SECONDS", 0.1)
    with listen(HOST) as listening, ThreadPoolExecutor(1) as threads, ExitStack() as opened:
        address = listening.getsockname()

        def call(said: bytes) -> socket.socket:
            end = opened.enter_context(socket.create_connection(address))
            end.sendall(said)
            return end

        strangers = [call(b""), call(TOKEN[:31]), call(bytes(32)), call(TOKEN[32:])]
        call(TOKEN[:5]).close()
        accepted = threads.submit(accept, listening, TOKEN)
        with closing(connect(address, TOKEN)) as link, closing(accepted.result()) as other:
            link.send(b"hello")
            assert other.receive() == b"hello"
        for end in strangers:
            end.settimeout(20)
            with suppress(ConnectionResetError):
                assert end.recv(64) == b""


def test_a_caller_with_another_token_is_told() -> None:
    with listen(HOST) as listening, ThreadPoolExecutor(1) as threads:
        address = listening.getsockname()
        accepted = threads.submit(accept, listening, TOKEN)
        with pytest.raises(OSError, match=r"does not know us|reset"):
            connect(address, bytes(TOKEN_BYTES))
        connect(address, TOKEN).close()
        accepted.result().close()


def test_who_answers_must_have_the_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECT_SECONDS", 0.1)
    with listen(HOST) as listening, ThreadPoolExecutor(1) as threads:
        calling = threads.submit(connect, listening.getsockname(), TOKEN)
        with listening.accept()[0] as end:
            end.sendall(bytes(32))
            with pytest.raises(ConnectionRefusedError):
                calling.result()
        with pytest.raises(TimeoutError):  # nobody answers
            connect(listening.getsockname(), TOKEN)


def test_it_listens_at_one_address_alone() -> None:
    with listen("127.0.0.2") as listening:
        port = listening.getsockname()[1]
        assert listening.getsockname()[0] == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))


def test_a_machine_that_confirms_nothing_is_given_up(ends: tuple[TcpLink, TcpLink]) -> None:
    ours, _ = ends
    ours.give_up_after(1.5)
    option = ours._end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert option == 1500
