"""Reading request bodies, with a bound on the bytes of all that are read at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from asyncllm.errors import BadRequest, TooLarge
from asyncllm.server.http.errors import HttpError

#: Smaller bodies need no room: aiohttp reads as much before anybody asks for it.
SMALL: Final = 2**16
#: How long a body waits for room until its request is refused.
WAIT_SECONDS: Final = 30.0

#: Encodings that aiohttp decodes before we see a body; clients may use no other.
_ENCODINGS: Final = frozenset(("", "identity", "gzip", "deflate", "br", "zstd"))


class IncompleteBody(web.RequestPayloadError):
    """The client has closed its side before the end of the body."""


class Bodies:
    """Room for bodies, given in order of arrival; connections that wait are not read from.

    Attributes:
        reserved: bytes that have been given to bodies.
    """

    def __init__(self, most: int):
        self.reserved = 0
        self._most = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many bodies wait for room."""
        return len(self._waiting)

    @asynccontextmanager
    async def read(
        self, request: web.Request, limit: int, seconds: float
    ) -> AsyncIterator[bytearray]:
        """The request's body, whatever its Content-Type; its room is free after the context.

        The limit is ours, not aiohttp's: in a mounted app that one belongs to the host.

        Raises:
            TooLarge: it has more than ``limit`` bytes, after decompression.
            HttpError: it has not arrived within ``seconds``, or is in an encoding we do not know,
                or there was no room for it.
            BadRequest: it breaks the rules of HTTP.
        """
        encoding = request.headers.get("Content-Encoding", "").lower()
        if encoding not in _ENCODINGS:
            raise HttpError("the Content-Encoding is not supported", 415)
        if (request.content_length or 0) > limit:
            raise TooLarge(f"the body exceeds {limit} bytes")
        is_here = request.content.is_eof()  # it came with the header, or right after: most do
        known = None if encoding not in ("", "identity") else request.content_length
        reserved = await self._take(0 if is_here else limit if known is None else known)
        try:
            try:
                if is_here:
                    body = bytearray(request.content.read_nowait())
                else:
                    body = await _receive(request, limit, seconds)
            except web.RequestPayloadError as error:
                if isinstance(error, IncompleteBody) and request.transport is not None:
                    request.transport.abort()  # there is nobody to answer
                raise BadRequest(f"the body cannot be read: {error}") from error
            if len(body) > limit:
                raise TooLarge(f"the body exceeds {limit} bytes")
            yield body
        finally:
            self._give_back(reserved)

    async def _take(self, num_bytes: int) -> int:
        """Wait for room for one body; returns how much to give back.

        Raises:
            HttpError: there was none for WAIT_SECONDS.
        """
        if num_bytes <= SMALL:
            return 0
        num_bytes = min(num_bytes, self._most)  # one body alone is always read
        if not self._waiting and self.reserved + num_bytes <= self._most:
            self.reserved += num_bytes
            return num_bytes
        given = asyncio.get_running_loop().create_future()
        place = (num_bytes, given)
        self._waiting.append(place)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await given
        except BaseException as error:
            if given.done() and not given.cancelled():
                self._give_back(num_bytes)  # it came together with the cancellation
            else:
                self._waiting.remove(place)
                self._serve()  # those behind it may need less
            if isinstance(error, TimeoutError):
                raise HttpError("too many large requests are being read", 503) from None
            raise
        return num_bytes

    def _give_back(self, num_bytes: int) -> None:
        self.reserved -= num_bytes
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self.reserved + self._waiting[0][0] <= self._most:
            num_bytes, given = self._waiting.popleft()
            if given.cancelled():
                continue
            self.reserved += num_bytes
            given.set_result(None)


async def _receive(request: web.Request, limit: int, seconds: float) -> bytearray:
    """The body as it arrives, up to the chunk that exceeds the limit."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit:
                    break
    except TimeoutError:
        raise HttpError(f"the body has not arrived within {seconds:g} s", 408) from None
    return body
