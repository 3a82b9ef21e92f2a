"""A client that reads event streams while spending next to nothing on each event.

It must not be what limits a benchmark: it counts the events in what the socket has, and looks into
none of them before the last ones.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from typing import cast

#: How an event begins. JSON has no bare newline, so this is not found inside of one.
EVENT = b"\ndata:"
DONE = re.compile(rb"\ndata: ?\[DONE\]")
#: The end of a chunked body.
LAST_CHUNK = b"0\r\n\r\n"
#: Bytes kept for the last look; the event with the usage and ``[DONE]`` fit.
KEPT = 4096

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_TOKENS = re.compile(rb'"completion_tokens": *(\d+)')
_NO_CHOICES = re.compile(rb'"choices": *\[\]')
_CONTENT = re.compile(rb'"content": *"[^"]')
#: A chat's end, where it brings no text.
_ONLY_END = re.compile(rb'\ndata:(?![^\n]*"content": *"[^"])[^\n]*"delta"[^\n]*"finish_reason": *"')
_ERROR = re.compile(rb'\ndata: ?\{"error"')


class Failure(Exception):
    """A request that was not answered; the message says how."""


class Reading:
    """One answer: when its events came, by ``time.perf_counter``, and its tokens.

    ``tokens`` is 0 until the server has said it, and if it never does.
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
        self._head = b""  # all that came, until it is known to be a stream
        self._tail = b""
        self._streaming = self._chunked = self._done = self._begun = self._has_role = False

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
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
        # Events that end in what was there before have been counted.
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
            self.close()  # what ends the body may be still on its way
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
        """Whether a stream has begun; ``_head`` is then its body so far, with a newline before."""
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
        """Take off the events that bring no tokens: the usage, a chat's role, marks of the end."""
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
        """The connection is not used again: what may still come belongs to this answer."""
        self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(Failure(message))


def _text(data: bytes) -> str:
    """The beginning of what a server said, on one line."""
    return " ".join(data[:400].decode(errors="replace").split())
