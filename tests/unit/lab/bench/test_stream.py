"""The load client's reading of event streams, however the bytes are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asyncllm.lab.bench.cases import Shot
from asyncllm.lab.bench.load import Target, request
from asyncllm.lab.bench.stream import Connection, Failure, Reading

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    return b'data: {"choices":[{"text":"%s"}],"usage":null}\n\n' % text.encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 12}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST = chunk(b"")


class FakeTransport(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def read(*pieces: bytes, lost: bool = False) -> tuple[Reading, FakeTransport]:
    """What a connection reads from these pieces, one after the other."""
    connection, transport = Connection(), FakeTransport()
    assert not connection.usable
    connection.connection_made(transport)
    answer = asyncio.ensure_future(connection.send(b"the request"))
    await asyncio.sleep(0)
    assert transport.written == b"the request"
    for piece in pieces:
        connection.data_received(piece)
    if lost:
        connection.connection_lost(None)
    return await asyncio.wait_for(answer, 1), transport


ONE_BY_ONE = HEAD + b"".join(map(chunk, (event("a"), event("b"), event("c"), USAGE, DONE))) + LAST
#: Two events in a chunk; a text that looks like an event; the end in one piece.
TRICKY = (
    HEAD
    + chunk(event("data: [DONE]") + event("\\ndata: x"))
    + chunk(event('\\"choices\\":[]') + USAGE + DONE)
    + LAST
)


@pytest.mark.parametrize(("whole", "events"), [(ONE_BY_ONE, 3), (TRICKY, 3)])
async def test_events_are_counted_however_the_bytes_are_cut(whole: bytes, events: int) -> None:
    for cut in range(1, len(whole)):
        reading, transport = await read(whole[:cut], whole[cut:])
        assert (len(reading.times), reading.tokens) == (events, 12), cut
        assert not transport.closed
    reading, _ = await read(*(whole[i : i + 1] for i in range(len(whole))))
    assert (len(reading.times), reading.tokens) == (events, 12)
    assert list(reading.times) == sorted(reading.times)


async def test_one_request_after_the_other_on_a_connection() -> None:
    connection, transport = Connection(), FakeTransport()
    connection.connection_made(transport)
    for _ in range(2):
        answer = asyncio.ensure_future(connection.send(b"x"))
        await asyncio.sleep(0)
        connection.data_received(ONE_BY_ONE[:-3])
        await asyncio.sleep(0)
        assert not answer.done(), "what ends the body must not be left for the next answer"
        connection.data_received(ONE_BY_ONE[-3:])
        assert len((await answer).times) == 3
        assert connection.usable


async def test_a_server_without_usage_or_with_other_spaces() -> None:
    body = b'data:{"choices":[{"text":"a"}]}\r\n\r\ndata:{"choices":[{"text":"b"}]}\r\n\r\n'
    reading, _ = await read(HEAD, chunk(body + b"data:[DONE]\r\n\r\n"), LAST)
    assert (len(reading.times), reading.tokens) == (2, 0)


async def test_a_body_without_chunks_is_the_last_of_its_connection() -> None:
    head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    reading, transport = await read(head, event("a"), event("b") + DONE, lost=True)
    assert len(reading.times) == 2
    assert transport.closed


async def test_a_long_last_event() -> None:
    reading, _ = await read(HEAD, chunk(event("x" * 50_000)), chunk(USAGE), chunk(DONE), LAST)
    assert (len(reading.times), reading.tokens) == (1, 12)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\nContent-Length: 5\r\n\r\nno", b"pe!"], "HTTP 400: nope!"),
        ([b"HTTP/1.1 503 Later\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"], "503"),
        ([b"HTTP/1.1 500 Oh\r\n\r\nbro", b"ken"], "broken"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], "not an answer in HTTP/1.1: SSH-2.0"),
        ([HEAD, chunk(event("a"))], "the connection was lost: closed by the server"),
        ([], "the connection was lost"),
        ([HEAD, chunk(b'data: {"error": {"message": "died"}}\n\n' + DONE), LAST], "died"),
    ],
)
async def test_failures(pieces: list[bytes], message: str) -> None:
    with pytest.raises(Failure, match=message):
        await read(*pieces, lost=True)


def test_a_request_has_the_head_and_body_that_the_server_needs() -> None:
    target = Target("http://localhost:8000/llm/", "some/model", 100, "secret")
    head, _, body = request(target, Shot(None, 5, 7, seed=3)).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /llm/v1/completions HTTP/1.1\r\nHost: localhost:8000\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in head
    assert head.endswith(b"Content-Length: %d" % len(body))
    has: Callable[[bytes], bool] = lambda part: part in body  # noqa: E731
    assert has(b'"model":"some/model"')
    assert has(b'"max_tokens":7')
    assert has(b'"ignore_eos":true')


# -- chats -----------------------------------------------------------------------------------------


def chat(delta: str, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"index":0,"delta":%s,"finish_reason":%s}]}\n\n' % (
        delta.encode(),
        finish.encode(),
    )


@pytest.mark.parametrize("role", ['{"role":"assistant","content":""}', '{"role": "assistant"}'])
@pytest.mark.parametrize("end", ["{}", '{"content": ""}'])
async def test_a_chat_begins_and_ends_without_text(role: str, end: str) -> None:
    words = [chat('{"content":"a"}'), chat('{"content":"b \\"content\\":\\"\\""}')]
    events = [chat(role), *words, chat(end, '"stop"'), USAGE, DONE]
    reading, _ = await read(HEAD, *map(chunk, events), LAST)
    assert (len(reading.times), reading.tokens) == (2, 12)
    reading, _ = await read(HEAD + chunk(b"".join(events)) + LAST)
    assert len(reading.times) == 2


async def test_a_chat_whose_first_and_last_events_have_text() -> None:
    first = chat('{"role":"assistant","content":"a"}')
    last = chat('{"content":"b"}', '"length"')
    reading, _ = await read(HEAD, *map(chunk, [first, last, DONE]), LAST)
    assert len(reading.times) == 2


def test_given_prompts_go_to_the_route_of_their_kind() -> None:
    target = Target("http://host:1", "m", 100)
    text = request(target, Shot(None, 0, 5, 0, given="hello"))
    assert b"POST /v1/completions " in text
    assert b'"prompt":"hello"' in text
    assert b"ignore_eos" not in text, "the model ends its answer"
    messages = [{"role": "user", "content": "hello"}]
    chat_request = request(target, Shot(None, 0, 5, 0, given=messages))
    assert b"POST /v1/chat/completions " in chat_request
    assert b'"messages":[{"role":"user","content":"hello"}]' in chat_request
