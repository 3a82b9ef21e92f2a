"""Whole answers that are long, and clients that are slow to read them."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.server.http import cuts as http_cuts
from asyncllm.server.http.cuts import BEHIND_SECONDS, GIVE_UP_SECONDS, MERGE_BYTES, Patience
from asyncllm.server.responses import store
from asyncllm.server.streaming import sse

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
    monkeypatch.setattr(http_cuts, "GIVE_UP_SECONDS", SECONDS)
    monkeypatch.setattr(http_cuts, "WATCH_SECONDS", 0.05)
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
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cause: str,
) -> None:
    monkeypatch.setattr(sse, "MERGE_BYTES", 1024)
    if cause == "stalled":
        monkeypatch.setattr(http_cuts, "GIVE_UP_SECONDS", 0.3)
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
