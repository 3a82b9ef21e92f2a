"""Where the first of several requests ends, in bytes that were received together."""

from __future__ import annotations

import pytest

from asyncllm.server.arrivals.routed import MOST_LINES, after_first

HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "more", [b"", b"G", b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0"]
)
@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"\r\n",
        b"\r\n\r\n" + HEAD + b"\r\n",
        HEAD + b"Content-Length: 9\r\n\r\n" + b"a\r\n\r\n\r\n\r\n",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\r\n\r",
        CHUNKED + b"0\r\n\r\n",
        CHUNKED + b"4;a=b\r\n\r\n\r\n\r\n0\r\nA: b\r\n\r\n",
        CHUNKED + b"5\r\n0\r\n\r\n\r\n00\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
    ],
)
async def test_what_follows(request_: bytes, more: bytes) -> None:
    assert after_first(request_ + more) == more


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEAD,
        CHUNKED + b"5\r\nab",
        b"BAD\r\n\r\n" + HEAD + b"\r\n",
        HEAD + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n" + HEAD,
        HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n" + HEAD,
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD,
        CHUNKED + b"%x\r\n" % MOST_LINES + b"\n" * MOST_LINES + b"\r\n0\r\n\r\n",
    ],
)
async def test_what_is_not_certain(data: bytes) -> None:
    assert after_first(data) is None
