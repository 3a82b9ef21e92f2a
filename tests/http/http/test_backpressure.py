"""Slow clients, on a transport that takes what the test lets it take."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import HttpVersion11

from asyncllm.server.arrivals.names import NUMBERS, Numbers
from asyncllm.server.http import slow_clients
from asyncllm.server.http.middleware import ARRIVED, request_id
from asyncllm.server.http.traffic import TRAFFIC, Traffic
from asyncllm.server.streaming.live import ChoiceSink
from asyncllm.server.streaming.sse import EventStream
from asyncllm.server.streaming.write_times import WRITE_TIMES, WriteTimes
from asyncllm.types import FinishReason, TokenDelta, TokenLogprob


class Transport:
    def __init__(self) -> None:
        self.unsent = 0
        self.closing = False
        self.writes: list[bytes] = []

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.writes.append(data)
        self.unsent += len(data)

    def abort(self) -> None:
        self.closing = True

    def get_extra_info(self, name: str) -> None:
        return None


class FakeRequest(dict[Any, Any]):
    version = HttpVersion11

    def __init__(self, transport: Transport):
        super().__init__({ARRIVED: 0.0})
        self.transport = transport
        self.app = {NUMBERS: Numbers(), TRAFFIC: Traffic(), WRITE_TIMES: WriteTimes()}


class Texts:
    """A reply whose frames are the text itself."""

    id = ""
    content_type = "text/plain"
    explain: Any = None

    def opening(self) -> bytes:
        return b"<"

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        return delta.text.encode()

    def closing(self) -> bytes:
        return b">"

    def failure(self, error: Exception) -> bytes:
        return str(error).encode()

    lost = failure

    def body(self, outputs: list[TokenDelta]) -> bytes:
        raise AssertionError


@pytest.fixture
async def opened() -> tuple[EventStream, Transport, ChoiceSink]:
    transport = Transport()
    request: Any = FakeRequest(transport)
    stream = EventStream(request, Texts(), 1)
    stream._open = True
    return stream, transport, ChoiceSink(stream, 0)


Opened = tuple[EventStream, Transport, ChoiceSink]


async def test_merges_while_the_client_is_behind(opened: Opened) -> None:
    _, transport, sink = opened
    sink.emit(TokenDelta("a"))
    assert transport.writes == [b"1\r\na\r\n"]
    transport.unsent = slow_clients.MERGE_BYTES + 1
    for text in "bcd":
        sink.emit(TokenDelta(text))
    assert len(transport.writes) == 1
    transport.unsent = slow_clients.MERGE_BYTES
    sink.emit(TokenDelta("e"))
    assert transport.writes[1] == b"4\r\nbcde\r\n"


async def test_the_sweep_writes_what_was_held_back(opened: Opened) -> None:
    stream, transport, sink = opened
    transport.unsent = slow_clients.MERGE_BYTES + 1
    sink.emit(TokenDelta("a"))
    stream.check_client(0.0)
    assert transport.writes == []
    transport.unsent = 0
    stream.check_client(0.0)
    assert transport.writes == [b"1\r\na\r\n"]


async def test_the_end_is_written_at_once(opened: Opened) -> None:
    stream, transport, sink = opened
    transport.unsent = slow_clients.MERGE_BYTES + 1
    sink.emit(TokenDelta("a"))
    sink.emit(TokenDelta("b", finish_reason=FinishReason.STOP))
    assert transport.writes == [b"3\r\nab>\r\n"]
    assert stream._ended.result() is None


@pytest.mark.parametrize("last", [False, True])
async def test_gives_up_a_client_too_far_behind(opened: Opened, last: bool) -> None:
    stream, transport, sink = opened
    transport.unsent = slow_clients.GIVE_UP_BYTES - 10
    sink.emit(TokenDelta("a" * 10))
    assert not stream._ended.done()
    sink.emit(TokenDelta("b", finish_reason=FinishReason.STOP if last else None))
    assert isinstance(stream._ended.result(), ConnectionError)
    assert transport.closing
    assert transport.writes == []


async def test_the_log_names_the_request_that_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    request: Any = FakeRequest(Transport())
    request_id.set("mine")
    stream = EventStream(request, Texts(), 1)
    stream._open = True
    request.transport.unsent = slow_clients.GIVE_UP_BYTES
    request_id.set("another")  # the engine delivers, in a context of its own
    ChoiceSink(stream, 0).emit(TokenDelta("a"))
    [record] = caplog.records
    assert record.message.startswith("request mine cut off")
    assert record.message.endswith(f"{slow_clients.GIVE_UP_BYTES} bytes unsent")
    assert request.app[TRAFFIC].slow_clients.counts == {"stalled": 0, "behind": 1, "room": 0}


async def test_logprobs_count_as_bytes_behind(opened: Opened) -> None:
    stream, transport, sink = opened
    transport.unsent = slow_clients.MERGE_BYTES + 1
    entry = TokenLogprob(1, -0.5, ((1, -0.5),) * 20)
    sink.emit(TokenDelta("a", logprobs=[entry]))
    sink.emit(TokenDelta("a", logprobs=[entry] * (slow_clients.GIVE_UP_BYTES // 21 // 64)))
    assert isinstance(stream._ended.result(), ConnectionError)


async def test_gives_up_a_client_that_takes_nothing(opened: Opened) -> None:
    stream, transport, sink = opened
    sink.emit(TokenDelta("a" * 1000))
    now = stream._patience._taken_at
    stream.check_client(now + 1)
    transport.unsent -= 1  # it took one byte
    stream.check_client(now + 50)
    stream.check_client(now + 50 + slow_clients.GIVE_UP_SECONDS)
    assert not stream._ended.done()
    sink.emit(TokenDelta("b"))  # more for it to read is no progress
    stream.check_client(now + 51 + slow_clients.GIVE_UP_SECONDS)
    assert isinstance(stream._ended.result(), ConnectionError)
    assert transport.closing


async def test_an_idle_client_is_not_slow(opened: Opened) -> None:
    """Nothing unsent: the engine takes its time, not the client."""
    stream, transport, sink = opened
    now = stream._patience._taken_at
    sink.emit(TokenDelta("a"))
    transport.unsent = 0
    stream.check_client(now + 10 * slow_clients.GIVE_UP_SECONDS)
    sink.emit(TokenDelta("b"))
    stream.check_client(now + 10 * slow_clients.GIVE_UP_SECONDS + 1)
    assert not stream._ended.done()


async def test_nothing_is_written_to_a_client_that_left(opened: Opened) -> None:
    stream, transport, sink = opened
    transport.closing = True
    sink.emit(TokenDelta("a"))
    sink.emit(TokenDelta("b", finish_reason=FinishReason.STOP))
    sink.fail(RuntimeError())
    assert isinstance(stream._ended.result(), ConnectionResetError)
