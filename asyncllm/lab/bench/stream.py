"""A client of event streams that spends almost no time per event, so as not to limit a benchmark.

It counts the events in the bytes of the socket, and parses only the last ones.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from typing import Final, cast

#: The start of an event. JSON has no bare newline, so it does not occur within one.
EVENT: Final = b"\ndata:"
DONE: Final = re.compile(rb"\ndata: ?\[DONE\]")
#: The end of a chunked body.
LAST_CHUNK: Final = b"0\r\n\r\n"
#: Bytes kept of those read before; the event with the usage and ``[DONE]`` fit.
KEPT: Final = 4096

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_TOKENS = re.compile(rb'"completion_tokens": *(\d+)')
_NO_CHOICES = re.compile(rb'"choices": *\[\]')
_CONTENT = re.compile(rb'"content": *"[^"]')
#: The last event of a chat, if it has no text.
_ONLY_END = re.compile(rb'\ndata:(?![^\n]*"content": *"[^"])[^\n]*"delta"[^\n]*"finish_reason": *"')
_ERROR = re.compile(rb'\ndata: ?\{"error"')


class Failure(Exception):
    """A request was not answered; the message says why."""


class Reading:
    """One answer: arrival times of its events, by ``time.perf_counter``, and its tokens.

    ``tokens`` is 0 until the server reports its usage.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self.tokens = 0


class Connection(asyncio.Protocol):
    """One request after the other over one socket; each answer must be an event stream."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._answered: asyncio.Future[Reading] | None = None
        self._reading = Reading()
        self._head = b""  # all bytes until the answer is known to be a stream
        self._tail = b""
        self._streaming = self._chunked = self._done = self._begun = self._has_role = False

    @property
    def usable(self) -> bool:
        """Another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes) -> Reading:
        """Send a whole HTTP request and read its answer.

        Raises:
            Failure: the answer is an error, or breaks off.
        """
        assert self._transport is not None, "only when connected"
        self._reading = Reading()
        self._head = self._tail = b""
        self._streaming = self._chunked = self._done = self._begun = self._has_role = False
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._streaming:
            self._head += data
            if not self._take_head():
                return
            data, self._head = self._head, b""
        # Events that end in the bytes before have been counted.
        seen = self._tail
        window = seen + data
        count = window.count(EVENT, max(0, len(seen) - len(EVENT) + 1))
        if count == 1:
            self._reading.times.append(now)
        elif count:
            self._reading.times.extend([now] * count)
        if not self._begun and b"\n\n" in window:
            self._begun = True
            first = window[: window.index(b"\n\n")]
            self._has_role = b'"role"' in first and _CONTENT.search(first) is None
        if not self._done and b"[DONE]" in window:
            self._look_for_end(window)
        self._tail = window[-KEPT:]
        if self._done and not self._chunked:
            self.close()  # the body ends with the connection
        if self._done and (window.endswith(LAST_CHUNK) or not self._chunked):
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done:
            self._finish()
        elif self._head:
            self._fail(_text(self._head))
        else:
            self._fail(f"the connection was lost: {exc or 'closed by the server'}")

    # -- the answer ------------------------------------------------------------------------------

    def _take_head(self) -> bool:
        """True once a stream has begun; ``_head`` is then its body so far, after a newline."""
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return False
        head, body = self._head[: end + 2], self._head[end + 4 :]
        status = _STATUS.match(head)
        if status is None:
            self._fail(f"not an answer in HTTP/1.1: {_text(head[:80])}")
            return False
        self._chunked = _CHUNKED.search(head) is not None
        if status[1] != b"200":
            length = _LENGTH.search(head)
            whole = len(body) >= int(length[1]) if length else body.endswith(LAST_CHUNK)
            if whole:
                self._fail(f"HTTP {status[1].decode()}: {_text(body)}")
            return False
        self._streaming = True
        self._head = b"\n" + body  # the first event of a body that is not chunked
        return True

    def _look_for_end(self, window: bytes) -> None:
        """At the end, drop events without tokens: the usage, a chat's role, ends."""
        if DONE.search(window) is None:
            return
        self._done = True
        without_tokens = [_NO_CHOICES, _ONLY_END] if self._has_role else [_NO_CHOICES]
        count = 1 + sum(pattern.search(window) is not None for pattern in without_tokens)
        del self._reading.times[-count:]
        if self._has_role:
            del self._reading.times[:1]
        if found := _TOKENS.findall(window):
            self._reading.tokens = int(found[-1])
        if _ERROR.search(window):
            self._fail(_text(window[window.rindex(b'{"error"') :]))

    def _finish(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(self._reading)

    def _fail(self, message: str) -> None:
        """Close the connection: bytes that still arrive belong to this answer."""
        self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(Failure(message))


def _text(data: bytes) -> str:
    """The beginning of an answer, on one line."""
    return " ".join(data[:400].decode(errors="replace").split())
