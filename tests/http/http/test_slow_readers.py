"""Whole answers that are long, and clients that are slow to read them."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import Payload

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.http import slow_clients
from asyncllm.server.http.answer import json_body
from asyncllm.server.http.slow_clients import (
    BEHIND_SECONDS,
    GIVE_UP_SECONDS,
    LONG_SECONDS,
    MERGE_BYTES,
    PATIENT_SECONDS,
    Cause,
    Patience,
    SlowClients,
)
from asyncllm.server.responses import store
from asyncllm.server.streaming import sse
from asyncllm.server.streaming.delivery import PackedLogprobs
from asyncllm.types import TokenLogprob
from tests.support.server.serving import serving

if TYPE_CHECKING:
    import socket

    from tests.support.server.serving import Server

SECONDS = 1.0
#: Answered with more bytes than the kernel takes off our hands.
LONG: dict[str, Any] = {
    "prompt": "a",
    "max_tokens": 4000,
    "ignore_eos": True,
    "logprobs": 20,
    "n": 4,
}


@pytest.fixture
def impatient(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(slow_clients, "GIVE_UP_SECONDS", SECONDS)
    monkeypatch.setattr(slow_clients, "WATCH_SECONDS", 0.05)
    return server


def ask(server: Server) -> socket.socket:
    """Have the long answer made, and read its first byte."""
    client = server.open("/v1/completions", LONG, extra="Connection: close\r\n")
    assert client.recv(1) == b"H"
    return client


def read_on(client: socket.socket) -> bytes:
    """All that is still to come, whether or not it is the end."""
    parts = []
    try:
        while part := client.recv(1 << 20):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def cuts(server: Server) -> dict[str, float]:
    """How many clients were cut off, by cause."""
    text = server.get("/metrics").body.decode()
    found = re.findall(r'^asyncllm_slow_readers_cut_total\{cause="(\w+)"\} (\S+)$', text, re.M)
    return {cause: float(count) for cause, count in found}


def until_cut(server: Server, before: dict[str, float], cause: str) -> None:
    """Wait until one more was counted: the page of metrics is kept for a moment."""
    end = time.monotonic() + 10
    while (found := cuts(server)) != {**before, cause: before[cause] + 1}:
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_a_client_that_does_not_read_is_cut_off(
    impatient: Server, caplog: pytest.LogCaptureFixture
) -> None:
    before = cuts(impatient)
    with ask(impatient) as client:
        # The engine is done with it, and so is all that a request holds.
        impatient.until_idle()
        assert impatient.get("/load").json == {"server_load": 0}
        assert impatient.post("/v1/completions", {"prompt": "b"}).status == 200
        time.sleep(2 * SECONDS)
        rest = read_on(client)
    head, _, body = rest.partition(b"\r\n\r\n")
    [length] = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")]
    assert len(body) < int(length.split()[1])
    until_cut(impatient, before, "stalled")
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    [name] = [line for line in head.split(b"\r\n") if line.startswith(b"X-Request-Id: ")]
    told = re.fullmatch(r"request (\w+) cut off: .*, (\d+) bytes unsent", record.message)
    assert told is not None, record.message
    assert told[1] == name.split()[1].decode()
    assert int(told[2]) > 0


@pytest.mark.parametrize("cause", ["stalled", "behind"])
def test_a_stream_that_is_not_read_is_cut_off(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: str
) -> None:
    monkeypatch.setattr(sse, "MERGE_BYTES", 1024)
    if cause == "stalled":
        monkeypatch.setattr(slow_clients, "GIVE_UP_SECONDS", 0.3)
        monkeypatch.setattr(sse, "GIVE_UP_BYTES", 1 << 30)
    else:
        monkeypatch.setattr(sse, "GIVE_UP_BYTES", 128 * 1024)
    caplog.set_level(logging.INFO)
    before = cuts(server)
    body = {**LONG, "stream": True}
    with server.open("/v1/completions", body, extra="X-Request-Id: slow\r\n"):
        server.until(lambda: any("slow aborted" in r.message for r in caplog.records), 20)
    until_cut(server, before, cause)
    [cut, aborted] = [record for record in caplog.records if "slow" in record.message]
    assert cut.levelno == logging.WARNING
    assert re.search(r"request slow cut off: .*, [1-9]\d+ bytes unsent", cut.message)
    assert aborted.message == "request slow aborted: client reads too slowly"


def test_a_slow_reader_gets_everything(impatient: Server) -> None:
    with ask(impatient) as client:
        began, parts = time.monotonic(), []
        while time.monotonic() < began + 3 * SECONDS:
            parts.append(client.recv(1 << 17))
            time.sleep(SECONDS / 20)
        parts.append(read_on(client))
    _, _, body = b"".join(parts).partition(b"\r\n\r\n")
    assert len(json.loads(body)["choices"]) == 4


def test_a_client_that_takes_a_byte_now_and_then_is_cut_off_in_the_end() -> None:
    """Whatever keeps it from being stalled; one that catches up starts anew."""
    pause, left = GIVE_UP_SECONDS / 2, MERGE_BYTES + 1
    patience, looks = Patience(0.0), round(BEHIND_SECONDS / pause)
    causes = [patience.cause(i, left, i * pause) for i in range(1, looks + 2)]
    assert causes == [None] * looks + ["behind"]
    patience = Patience(0.0)
    for i in range(1, 3 * looks):
        assert patience.cause(i, 0 if i % looks == 0 else left, i * pause) is None


def test_a_client_that_takes_nothing_is_stalled_however_little_is_left() -> None:
    patience = Patience(0.0)
    assert patience.cause(5, 1, 0.0) is None
    assert patience.cause(5, 1, GIVE_UP_SECONDS) is None
    assert patience.cause(5, 1, GIVE_UP_SECONDS + 1) == "stalled"
    assert patience.cause(5, 0, 2 * GIVE_UP_SECONDS) is None, "there is nothing to take"


def test_events_of_a_background_response_that_are_not_read(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "GIVE_UP_SECONDS", 0.3)
    before = cuts(server)
    log = store.EventLog()
    log.add(b"data: " + b"x" * (8 << 20) + b"\n\n")
    log.close()
    fields = {"input": "a", "background": True, "stream": True, "store": True}
    created = server.post("/v1/responses", fields).events[0]["response"]["id"]
    send = store.EventLog.send
    monkeypatch.setattr(store.EventLog, "send", lambda _, *args: send(log, *args))
    with server.open(f"/v1/responses/{created}?stream=true", None, method="GET"):
        server.until(lambda: any("cut off" in r.message for r in caplog.records), 20)
    until_cut(server, before, "stalled")


# -- what is kept for all of them ------------------------------------------------------------------


class Slow:
    """A client that needs a given time for the rest of its answer."""

    def __init__(self, cuts: SlowClients, num_bytes: int, seconds: float):
        self._cuts, self._seconds = cuts, seconds
        self.cause: str | None = None
        self.num_bytes = num_bytes

    def seconds_left(self, now: float) -> float:
        return self._seconds

    def give_up(self, cause: Cause) -> None:
        self.cause = cause
        self._cuts.keep(self, 0, 0.0)


def test_the_slowest_are_cut_off_until_the_rest_fits() -> None:
    cuts = SlowClients(100)
    clients = [Slow(cuts, 30, seconds) for seconds in (50.0, math.inf, LONG_SECONDS - 1, 20.0)]
    for now, client in enumerate(clients):
        cuts.keep(client, client.num_bytes, float(now))
    assert [client.cause for client in clients] == [None, "room", None, None]
    assert cuts.kept == 90
    cuts.keep(clients[2], 60, 5.0)
    assert [client.cause for client in clients] == ["room", "room", None, None]
    cuts.keep(clients[2], 200, 6.0)
    assert [client.cause for client in clients] == ["room", "room", None, "room"]
    assert cuts.kept == 200, "one alone may have more, and this one reads fast"
    cuts.keep(clients[2], 0, 7.0)
    assert (cuts.kept, cuts.take_freed(), cuts.take_freed()) == (0, 290, 0)


def test_the_pace_of_a_client_counts_from_when_it_fell_behind() -> None:
    patience = Patience(0.0)
    assert patience.cause(10**9, MERGE_BYTES, 10.0) is None
    assert patience.seconds_left(10**6, 10.0 + PATIENT_SECONDS / 2) == 0.0, "not for long yet"
    assert patience.seconds_left(10**6, 12.0) == math.inf
    patience.cause(10**9 + 10**5, 10**6, 12.0)
    assert patience.seconds_left(10**6, 12.0) == 20.0


def test_clients_that_do_not_read_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for a few of them, and for a client beside them that reads."""
    monkeypatch.setattr(slow_clients, "PATIENT_SECONDS", 0.0)
    monkeypatch.setattr(slow_clients, "LONG_SECONDS", 0.2)
    monkeypatch.setattr(sse, "GIVE_UP_BYTES", 1 << 30)  # only all together are too much
    most, body = 4_000_000, {**LONG, "stream": True}
    with serving(config=ServerConfig(max_unsent_bytes=most)) as server, ExitStack() as stack:
        clients = [stack.enter_context(server.open("/v1/completions", body)) for _ in range(8)]
        end = time.monotonic() + 40
        while not cuts(server)["room"] or unsent(server) > most:
            assert time.monotonic() < end
        assert cuts(server)["room"] < 8, "no more than it takes"
        fast = server.post("/v1/completions", {**body, "max_tokens": 50})
        assert fast.body.endswith(b"data: [DONE]\n\n")
        for client in clients:
            client.close()
        server.until_idle()
        while unsent(server):
            assert time.monotonic() < end


def unsent(server: Server) -> float:
    """Bytes that are kept for slow clients."""
    found = re.search(r"^asyncllm_unsent_bytes (\S+)$", server.get("/metrics").body.decode(), re.M)
    assert found is not None
    return float(found[1])


def test_a_stream_that_was_kept_for_its_client_is_whole(server: Server) -> None:
    """Most of it was made while nobody read."""
    body = {**LONG, "stream": True, "max_tokens": 600, "seed": 1, "temperature": 0}
    whole = server.post("/v1/completions", body).body
    with server.open("/v1/completions", body, extra="Connection: close\r\n") as client:
        time.sleep(SECONDS)
        kept = read_on(client)
    assert texts(dechunked(kept)) == texts(whole)


def dechunked(answer: bytes) -> bytes:
    """The body of a chunked answer."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def texts(stream: bytes) -> dict[int, tuple[str, int]]:
    """Of each choice, its text and how many of its tokens have logprobs."""
    found: dict[int, tuple[str, int]] = {}
    for line in stream.split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text, count = found.get(choice["index"], ("", 0))
                tokens = choice["logprobs"]["tokens"] if choice["logprobs"] else []
                found[choice["index"]] = text + choice["text"], count + len(tokens)
    return found


async def test_a_body_is_freed_when_it_is_written() -> None:
    written: list[bytes] = []

    class Writer:
        async def write(self, chunk: memoryview) -> None:
            written.append(bytes(chunk))

    body = json_body(b"x" * 200_000).body
    assert isinstance(body, Payload)
    await body.write(Writer())  # type: ignore[arg-type]
    assert (b"".join(written), len(written)) == (b"x" * 200_000, 4)
    assert body.decode() == "", "an idle connection keeps its last answer"


def test_packed_logprobs_are_what_was_put_in() -> None:
    entries = [
        TokenLogprob(5, -0.25, ((5, -0.25), (7, -1.5))),
        TokenLogprob(9, float("-inf")),
        TokenLogprob(2**31 - 1, -1e-30, ((1, -0.1),) * 20),
    ]
    packed = PackedLogprobs()
    assert (len(packed), list(packed)) == (0, [])
    packed.extend(entries[:2])
    packed.extend(entries[2:])
    assert list(packed) == entries
    assert (packed[-1], packed[1:]) == (entries[-1], entries[1:])
