"""Whatever a client sends, it gets an answer or a 4xx, and the server goes on."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.native.requests import GenerateRequest
from asyncllm.server.openai.requests import CompletionRequest
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server, serving

ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/generate": (GenerateRequest, {"prompt": "a"}),
}

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.sampled_from(["auto", "user", "fake", "text", "function"]),
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "include_usage", "a"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)

quick = settings(
    max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("path", ROUTES)
@quick
@given(data=st.data())
def test_any_fields(server: Server, path: str, data: st.DataObject) -> None:
    kind, valid = ROUTES[path]
    names = st.sampled_from([field.name for field in msgspec.structs.fields(kind)])
    body = valid | data.draw(st.dictionaries(names, VALUES, max_size=3))
    answer = server.post(path, body)
    assert answer.status in (200, 400, 404), answer.body
    if answer.status != 200:
        assert answer.json["error"]["message"]


@quick
@given(body=st.binary(max_size=200))
def test_any_bytes(server: Server, body: bytes) -> None:
    assert server.post("/v1/completions", body).status == 400


@quick
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30))
def test_any_text_comes_back_whole(server: Server, text: str) -> None:
    body = {"prompt": text, "max_tokens": 1000, "stream": True}
    frames = server.post("/v1/completions", body).frames
    assert "".join(frame["choices"][0]["text"] for frame in frames) == text


HOST = b"Host: x\r\n"
POST = b"POST /generate HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
VALID = POST + b'Content-Length: 15\r\n\r\n{"prompt": "a"}'
GET = b"GET /version HTTP/1.1\r\n" + HOST


def post(body: bytes, kind: bytes = b"application/json") -> bytes:
    return POST + b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)


#: 100 MB of blanks.
BOMB = gzip.compress(b" " * 100_000_000, 1)

#: What is refused at once, with one of these statuses; an empty list: the connection is closed.
MALFORMED: list[tuple[bytes, list[int]]] = [
    (b"garbage\r\n\r\n", [400]),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), [400]),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    (b"GET /version HTTP/9.9\r\n" + HOST + b"\r\n", [400]),
    (b"GET /version HTTP/1.1\nHost: x\n\n", [400]),
    (b"GET /version HTTP/1.1\r\n\r\n", [400]),
    (b"GET /version HTTP/1.1\r\nHost : x\r\n\r\n", [400]),
    (b"GET http://[::1/ HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    (b"GET http://h:99999999/ HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    (GET + b"A: b\x00c\r\n\r\n", [400]),
    (GET + b"A: b\r\n c\r\n\r\n", [400]),
    (GET + b"\x00: b\r\n\r\n", [400]),
    (GET + b": b\r\n\r\n", [400]),
    (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", [431]),
    (GET + b"A: " + b"b" * 20_000 + b"\r\n\r\n", [431]),
    (GET + b"A" * 20_000 + b": b\r\n\r\n", [431]),
    (GET + b"A: b\r\n" * 200 + b"\r\n", [431]),
    (GET + b"".join(b"A%d: %b\r\n" % (i, b"b" * 8000) for i in range(500)), [431]),
    (POST + b"Content-Length: -1\r\n\r\n{}", [400]),
    (POST + b"Content-Length: +2\r\n\r\n{}", [400]),
    (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ", [400]),
    (POST + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n{}", [400]),
    (POST + b"Content-Length: 99999999999\r\n\r\n{}", [413]),
    (POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [400]),
    (POST + b"Transfer-Encoding: gzip\r\n\r\n2\r\n{}\r\n0\r\n\r\n", [400]),
    (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", [400]),
    (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", [400]),
    (CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", [400]),
    (CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n", [400]),
    (CHUNKED + b"f" * 30 + b"\r\n{}\r\n", [400]),
    (CHUNKED + b"2\r\n{}garbage\r\n0\r\n\r\n", [400]),
    (CHUNKED + b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 1000 + b"\r\n", [431]),
    (POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", [400]),
    (POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB, [413]),
    (POST + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}", [400]),
    (POST + b"Content-Encoding: secret\r\nContent-Length: 2\r\n\r\n{}", [415]),
    (POST + b"Expect: the-unexpected\r\nContent-Length: 2\r\n\r\n{}", [417]),
    (POST + b"Expect: the-\xf4\r\nContent-Length: 2\r\n\r\n{}", [400]),
    (b"GET /nothing HTTP/1.1\r\nHost: x\r\nExpect: \xff\r\n\r\n", [400]),
    (b"CONNECT x:80 HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    (b"BREW /generate HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    (b"TRACE /version HTTP/1.1\r\n" + HOST + b"\r\n", [405]),
    (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    (b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    (b"GET /%ff/%00 HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    (b"GET //version HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    (VALID[:-1] + b"!", [400]),
    (post('{"prompt": "a"}'.encode("utf-16")), [400]),
    (post(b"prompt=a", b"application/x-www-form-urlencoded"), [400]),
    (post(b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--b--\r\n'), [400]),
    (post(b"", b"multipart/form-data"), [400]),
    (POST + b"\r\n", [400]),  # without a length there is no body
    # What never gets complete is cut off, with an answer where it can be told what of.
    (b"", []),
    (b"\r\n\r\n\r\n", []),
    (b"GET /vers", []),
    (GET, []),
    (GET + b"A: b", []),
    (VALID[:-5], [408]),
    (CHUNKED + b"5\r\n{", [408]),
    (CHUNKED + b"2\r\n{}\r\n", [408]),
    # What is valid although it looks odd.
    (VALID + b"\r\n", [200]),
    (VALID.replace(b"Host", b"Connection: close\r\nHost") + b"\r\n", [200]),
    (GET + b"\r\n" + VALID + GET + b"\r\n", [200, 200, 200]),
    (GET + b"Content-Length: 5\r\n\r\nhello" + GET + b"\r\n", [200, 200]),
    ((GET + b"\r\n") * 100, [200] * 100),
    (GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", [200]),
    (GET + b"X-Request-Id: \xff\xfe\r\n\r\n", [200]),
    (CHUNKED + b"f;a=b\r\n" + VALID[-15:] + b"\r\n0\r\nTrailer: x\r\n\r\n", [200]),
    (VALID.replace(b"Host", b"Expect: 100-continue\r\nHost"), [100, 200]),
]

#: A server that does not wait long for what clients are late with.
IMPATIENT = ServerConfig(request_seconds=0.3)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Server]:
    with serving(config=IMPATIENT) as running:
        yield running
        running.until_idle()


def send(server: Server, data: bytes) -> bytes:
    """All that the server answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        answer = b""
        with suppress(BrokenPipeError, ConnectionResetError):  # it need not read to the end
            client.sendall(data)
        with suppress(ConnectionResetError):
            while received := client.recv(65536):
                answer += received
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)]


def check_error(answer: bytes) -> None:
    """The last of the answers is an error as OpenAI writes it."""
    head, _, body = answer.rpartition(b"\r\n\r\n")
    assert b"\r\nX-Request-Id: " in head
    assert b"aiohttp" not in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("data", "expected"), MALFORMED, ids=lambda value: repr(value)[:60])
def test_malformed_http(impatient: Server, data: bytes, expected: list[int]) -> None:
    answer = send(impatient, data)
    found = statuses(answer)
    assert found == expected
    if found and found[-1] >= 400:
        check_error(answer)
    assert impatient.get("/version").status == 200


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (VALID, b"garbage\r\n\r\n"),
        (GET + b"\r\n", POST + b"Content-Length: x\r\n\r\n"),
        (GET + b"Connection: close\r\n\r\n", GET + b"\r\n"),
    ],
)
def test_malformed_pipelines(impatient: Server, first: bytes, second: bytes) -> None:
    """Whether what came before is answered depends on how the network cut the two."""
    answer = send(impatient, first + second)
    assert statuses(answer) in ([400], [200], [200, 400])
    assert impatient.get("/version").status == 200


def test_a_header_that_never_ends(impatient: Server) -> None:
    """It is read up to a limit, not until memory is full."""
    sent = 0
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=10) as client:
        client.sendall(GET)
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 200_000_000:
                sent += client.send(b"A: " + b"b" * 8000 + b"\r\n")
    assert sent < 50_000_000  # most of it fills buffers of sockets
    assert impatient.get("/version").status == 200


def test_dripping_headers(impatient: Server) -> None:
    """Who keeps sending, but slowly, is cut off all the same."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=10) as client:
        client.settimeout(0.05)
        client.sendall(GET)
        while True:
            assert time.monotonic() - begun < 5
            try:
                client.sendall(b"A: b\r\n")
                if client.recv(1000) == b"":
                    break
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
    assert time.monotonic() - begun > 0.2


def test_a_long_stream_is_not_cut_off() -> None:
    """Nor is one that follows another on the same connection."""
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with serving(lambda: FakeLLM(step_seconds=0.01), IMPATIENT) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        for _ in range(2):
            begun = time.monotonic()
            connection.request("POST", "/generate", json.dumps(body))
            text = connection.getresponse().read()
            assert text.endswith(b"data: [DONE]\n\n")
            assert text.count(b'"text":"a"') == 100
            assert time.monotonic() - begun > 2 * IMPATIENT.request_seconds
        connection.close()


@pytest.mark.parametrize("size", [0, 10, len(POST), len(VALID) - 3, len(VALID)])
def test_early_close(impatient: Server, size: int) -> None:
    for reset in (False, True):
        for _ in range(20):
            client = socket.create_connection(("127.0.0.1", impatient.port), timeout=10)
            client.sendall(VALID[:size])
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
    impatient.until_idle()  # a close is noticed milliseconds later, and the queue is short
    assert impatient.post("/generate", {"prompt": "a"}).json["text"] == "a"


EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from(["cut", "repeat", "put"]),
        st.binary(max_size=4) | st.sampled_from([b"\r\n", b"\x00", b":", b" ", b"\r\n\r\n"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(quick, max_examples=60)
@given(
    whole=st.sampled_from([VALID, CHUNKED + b"f\r\n" + VALID[-15:] + b"\r\n0\r\n\r\n"]), edits=EDITS
)
def test_any_damage(impatient: Server, whole: bytes, edits: list[tuple[float, str, bytes]]) -> None:
    for where, edit, piece in edits:
        i = int(where * len(whole))
        j = min(len(whole), i + 8)
        middle = {"cut": b"", "repeat": whole[i:j] * 2, "put": piece}[edit]
        whole = whole[:i] + middle + whole[j if edit != "put" else i :]
    found = statuses(send(impatient, whole))
    assert all(status == 200 or 400 <= status < 500 for status in found)
    assert impatient.get("/version").status == 200
