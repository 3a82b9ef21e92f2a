"""The accept loop: many connections in a turn, and what it does when accept fails."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from asyncllm.server.http import acceptor
from asyncllm.server.http.acceptor import Acceptor
from asyncllm.server.http.traffic import RECENT_SECONDS, Waits
from asyncllm.supervise.crowd import Crowd
from asyncllm.supervise.listening import bind

if TYPE_CHECKING:
    from collections.abc import Callable


class Connected(asyncio.Protocol):
    def __init__(self, made: list[asyncio.BaseTransport]):
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(transport)


class Flaky(socket.socket):
    """Its accept fails as it is told to, and counts its calls."""

    failures: list[int]
    calls = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.calls += 1
        if self.failures:
            raise OSError(self.failures.pop(0), "planted")
        return super().accept()


def flaky(failures: list[int]) -> Flaky:
    listening = Flaky()
    listening.failures = failures
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    listening.setblocking(False)
    return listening


def connect(
    listening: socket.socket, count: int, begins: bytes = b"GET /v1/models"
) -> list[socket.socket]:
    clients = []
    for _ in range(count):
        client = socket.create_connection(listening.getsockname()[:2])
        client.sendall(begins)
        clients.append(client)
    return clients


async def turns_until(condition: Callable[[], bool], seconds: float = 3.0) -> int:
    turns, end = 0, time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0)
        turns += 1
    return turns


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_accepts_many_in_one_turn(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        made: list[asyncio.BaseTransport] = []
        waits = Waits()
        [listening] = bind("127.0.0.1", 0)
        clients = connect(listening, 300)
        await asyncio.sleep(0.1)
        accepting = Acceptor([listening], lambda _: Connected(made), Crowd(), waits)
        assert await turns_until(lambda: len(made) == 300) < 20
        # All of them had been waiting, and the system knows for how long.
        assert waits.distribution.count == 300
        assert 0.05 < waits.longest < 60
        await accepting.aclose()
        for transport in made:
            transport.close()
        for client in clients:
            client.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


async def test_probes_are_served_before_others() -> None:
    made: list[asyncio.BaseTransport] = []
    [listening] = bind("127.0.0.1", 0)
    clients = connect(listening, 100)
    silent = connect(listening, 2, b"")
    probe, late = connect(listening, 1, b"GET /health HTTP/1.1\r\n")[0], silent[1]
    accepting = Acceptor([listening], lambda _: Connected(made), Crowd(), Waits())

    def place(client: socket.socket) -> int:
        peers = [transport.get_extra_info("peername") for transport in made]
        return peers.index(client.getsockname())

    await turns_until(lambda: bool(made))
    assert len(made) < 40
    assert place(probe) == 0
    late.sendall(b"GET /ready HTTP/1.1\r\n")
    await turns_until(lambda: len(made) == 103)
    assert place(late) < 100
    assert place(silent[0]) == 102
    await accepting.aclose()
    for client in (*clients, *silent, probe):
        client.close()


async def test_without_files_it_waits_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "RETRY_SECONDS", 0.02)
    made: list[asyncio.BaseTransport] = []
    listening = flaky([errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
    [client] = connect(listening, 1)
    accepting = Acceptor([listening], lambda _: Connected(made), Crowd(), Waits())
    with caplog.at_level(logging.ERROR):
        await turns_until(lambda: len(made) == 1)
    assert listening.calls <= 3 + 2, "it does not spin"
    [record] = caplog.records
    assert "cannot accept" in record.message
    await accepting.aclose()
    client.close()


async def test_a_connection_that_broke_does_not_hold_up_the_next() -> None:
    made: list[asyncio.BaseTransport] = []
    listening = flaky([errno.ECONNABORTED, errno.EPROTO])
    [client] = connect(listening, 1)
    accepting = Acceptor([listening], lambda _: Connected(made), Crowd(), Waits())
    assert await turns_until(lambda: len(made) == 1) < 20
    await accepting.aclose()
    client.close()


async def test_accepted_connections_survive_closing() -> None:
    made: list[asyncio.BaseTransport] = []
    [listening] = bind("127.0.0.1", 0)
    clients = connect(listening, 5)
    accepting = Acceptor([listening], lambda _: Connected(made), Crowd(), Waits())
    accepting._accept(listening)
    await accepting.aclose()
    assert len(made) == 5
    assert listening.fileno() == -1
    for client in clients:
        client.close()


async def test_it_closes_while_it_waits_for_files() -> None:
    listening = flaky([errno.EMFILE] * 10)
    [client] = connect(listening, 1)
    accepting = Acceptor([listening], lambda _: asyncio.Protocol(), Crowd(), Waits())
    await turns_until(lambda: listening.calls == 1)
    await accepting.aclose()
    await asyncio.sleep(1.5 * acceptor.RETRY_SECONDS)
    assert listening.calls == 1
    client.close()


async def test_a_protocol_that_cannot_be_made_costs_its_connection_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: object) -> asyncio.Protocol:
        raise RuntimeError("planted")

    [listening] = bind("127.0.0.1", 0)
    [client] = connect(listening, 1)
    accepting = Acceptor([listening], fail, Crowd(), Waits())
    await turns_until(lambda: "planted" in caplog.text)
    await accepting.aclose()
    client.settimeout(3)
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    client.close()


async def test_all_addresses_of_a_name_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(*_: object, **__: object) -> list[Any]:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{i}", 0)) for i in (1, 2)]
        absent = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.1", 0))
        return [absent, *found, *found]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    sockets = bind("some.name", 0)
    names = [listening.getsockname() for listening in sockets]
    assert [host for host, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert names[0][1] == names[1][1] > 0
    for listening in sockets:
        listening.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_ipv6() -> None:
    [listening] = bind("::1", 0)
    assert listening.getsockname()[0] == "::1"
    [client] = connect(listening, 1)
    client.close()
    listening.close()


async def test_addresses_that_cannot_be_bound() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        bind("203.0.113.1", 0)
    [taken] = bind("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])
    taken.close()


def test_the_longest_wait_is_forgotten_after_a_while() -> None:
    now = 0.0
    waits = Waits(lambda: now)
    waits.observe(3.0)
    waits.observe(1.0)
    assert (waits.longest, waits.last) == (3.0, 1.0)
    now = RECENT_SECONDS + 1
    waits.observe(2.0)
    assert waits.longest == 3.0
    now += RECENT_SECONDS
    assert waits.longest == 2.0
    now += 2 * RECENT_SECONDS
    assert waits.longest == 0.0
