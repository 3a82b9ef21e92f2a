"""Connections of a replica: the front reads a request, and gives the socket to a replica.

The front keeps an end of its own. So a replica that has answered only says so and closes its end,
and the connection of one that dies is still there: for its last words, or for another replica.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser

from asyncllm.errors import EngineDead
from asyncllm.server.arrivals.names import NUMBERS, Numbers
from asyncllm.server.http.connection import KIND, Connection
from asyncllm.server.http.listener import Listener
from asyncllm.server.http.middleware import HAND_OVER
from asyncllm.supervise.front_channel import (
    BEGUN,
    CLOSED,
    FREE,
    KEPT,
    MOVED,
    NOWHERE,
    NUMBER_BYTES,
    FrontChannel,
    sent,
)

#: Bytes of a client that are kept: longer requests are known by their length, if that is certain.
MOST_KEPT: Final = 64 * 1024
#: Of more lines, the end of a request is not looked for: these take a millisecond.
MOST_LINES: Final = 4096
#: What a client that is promised a stream is told if the replica dies.
LOST: Final = EngineDead("the replica that was answering has died")


class Routed:
    """One connection as the front knows it; tells the front what becomes of it.

    Attributes:
        channel: to the front.
    """

    def __init__(self, channel: FrontChannel, number: int):
        self.channel = channel
        self._number = number
        self._is_over = False
        self._begin(b"")

    def _begin(self, data: bytes | None) -> None:
        """A request begins with this; None if its beginning is not known."""
        self._num_received = 0
        self._head_bytes: int | None = None
        self._end = b""
        self._kept: bytearray | None = None if data is None else bytearray()
        self._is_cut = False
        self.received(data or b"")

    @property
    def is_question(self) -> bool:
        """Whether the client is the front, which asks all replicas."""
        return self._number == 0

    def attach(self, protocol: Connection) -> None:
        """The connection is served by this protocol."""
        if isinstance(protocol, RoutedConnection):
            protocol.routed = self

    def received(self, data: bytes) -> None:
        self._num_received += len(data)
        self._end = (self._end + data[-4:])[-4:]
        if self._kept is None:
            return
        start = max(0, len(self._kept) - 3)
        self._kept += data
        if self._head_bytes is None and not self._is_cut:
            end = self._kept.find(b"\r\n\r\n", start)
            self._head_bytes = None if end < 0 else end + 4
        if len(self._kept) > MOST_KEPT:
            self._kept = None

    def cut(self, request: web.BaseRequest, *, is_alone: bool) -> None:
        """Keep only what has come, and comes, after this request, if all of it has come.

        Args:
            is_alone: no other request has been found after it.
        """
        if self._is_cut or not request.content.is_eof():
            return
        rest: bytes | None = b""
        if not (is_alone and self._ends_with(request)):
            rest = None if self._kept is None else after_first(bytes(self._kept))
        self._kept = None if rest is None else bytearray(rest)
        self._is_cut = True

    @property
    def rest(self) -> bytes | None:
        """What has come after the request; None if that is not known."""
        return bytes(self._kept) if self._is_cut and self._kept is not None else None

    def answered(self) -> None:
        """What comes is the next request, or has come already."""
        self._begin(self.rest)

    def begun(self, transport: asyncio.WriteTransport, last_words: bytes) -> None:
        """An answer begins; nothing of it is written yet."""
        self._tell(BEGUN, _next(transport) + last_words)

    def kept(self, transport: asyncio.WriteTransport, *, is_last: bool) -> None:
        """An answer is written; with ``is_last``, no other follows on the connection."""
        self._tell(KEPT, NOWHERE if is_last else _next(transport))

    def over(self, kind: bytes) -> None:
        """The replica has nothing more to do with the connection; the first call counts."""
        self._tell(kind)
        self._is_over = True

    def goes_home(self, replica: int, *pieces: bytes) -> None:
        """Another replica answers, and the connection is its from now on.

        Args:
            pieces: the request, and what has come after it.

        Raises:
            OSError: this process has too many open files.
        """
        self.channel.send_home(self._number, replica, *pieces)
        self._is_over = True

    def _ends_with(self, request: web.BaseRequest) -> bool:
        """Whether nothing has come after this request, if no other has been found."""
        if hdrs.TRANSFER_ENCODING in request.headers:
            return self._end == b"\r\n\r\n"  # as its last chunk ends, and no part of a head
        if self._head_bytes is None:
            return False
        return self._num_received == self._head_bytes + (request.content_length or 0)

    def _tell(self, kind: bytes, more: bytes = b"") -> None:
        if not self._is_over:
            self.channel.tell(kind, self._number, more)


class RoutedConnection(Connection):
    """Gives its client back to the front after an answer.

    Attributes:
        routed: what the front is told; None before the connection is known.
    """

    __slots__ = ("routed",)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.routed: Routed | None = None

    def data_received(self, data: bytes) -> None:
        if self.routed is not None:
            self.routed.received(data)
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.routed is not None:
            self.routed.over(CLOSED)
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        finished, is_reset = await super().finish_response(request, resp, start_time)
        transport, routed = self.transport, self.routed
        if transport is not None and routed is not None and not transport.is_closing():
            is_all = self.after(request) == b"" and transport.get_write_buffer_size() == 0
            ends = is_reset or not finished.keep_alive or self.half_closed is not None
            if is_all and not ends:
                transport.abort()  # the front has an end, too: the connection stays open
                routed.over(FREE)
            else:
                routed.kept(transport, is_last=ends)
                routed.answered()
        return finished, is_reset

    def after(self, request: web.BaseRequest) -> bytes | None:
        """What the client has sent after this request, which is being answered.

        None if that is not known; then another process cannot read on.
        """
        if self._upgraded or self.routed is None:
            return None
        self.routed.cut(request, is_alone=not self._messages)
        return self.routed.rest


def _next(transport: asyncio.WriteTransport) -> bytes:
    """Where in the stream to the client the next byte will be that is written."""
    at = sent(transport.get_extra_info("socket").fileno()) or 0
    return (at + transport.get_write_buffer_size()).to_bytes(NUMBER_BYTES, "big")


def after_first(data: bytes) -> bytes | None:
    """What follows the first request in these bytes; None if that is not certain.

    It is read line by line, as every head and the last chunk of a body end with one.
    """
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(BaseProtocol(loop), loop, MOST_KEPT, auto_decompress=False)
    body, at, lines = None, 0, data.splitlines(keepends=True)
    for line in lines[:MOST_LINES]:
        at += len(line)
        try:
            messages, is_upgraded, _ = parser.feed_data(line)
        except HttpProcessingError:
            return None
        if messages:
            head, body = messages[0]
            if is_upgraded or head.upgrade:
                return None
            if not head.chunked:
                return data[at + int(head.headers.get(hdrs.CONTENT_LENGTH, 0)) :]
        if body is not None and body.is_eof():
            return data[at:]
    return None


def return_to_front(request: web.Request, has_died: Callable[[], bool]) -> bool:
    """Give a request that the engine took with it back to the front, for another replica.

    False if it must be answered here.
    """
    protocol, transport = request.protocol, request.transport
    if transport is None or transport.is_closing() or not has_died():
        return False
    if not isinstance(protocol, RoutedConnection) or (routed := protocol.routed) is None:
        return False
    if request.writer.output_size > 0 or transport.get_write_buffer_size() > 0:
        return False
    if protocol.after(request) != b"":
        return False
    transport.abort()
    routed.over(MOVED)
    return True


async def begin(request: web.Request, response: web.StreamResponse) -> None:
    """An ``on_response_prepare`` signal: the request cannot move any more."""
    routed = routed_of(request)
    if routed is not None:
        if isinstance(request.protocol, RoutedConnection):
            request.protocol.after(request)  # its bytes need not be kept
        words = request.get(LAST_WORDS, b"")
        if words and request.version >= HttpVersion11:
            words = b"%x\r\n%b\r\n0\r\n\r\n" % (len(words), words)
        if request.transport is not None:
            routed.begun(request.transport, words)


#: In base 64.
LAST_WORDS_HEADER: Final = "X-Asyncllm-Last-Words"


def add_routing(app: web.Application, numbers: Numbers, has_died: Callable[[], bool]) -> None:
    """To be called before the application serves.

    Args:
        has_died: whether requests that are not answered yet should go elsewhere.
    """
    app[NUMBERS] = numbers
    app[KIND] = RoutedConnection
    app[HAND_OVER] = lambda request: return_to_front(request, has_died)
    app.on_response_prepare.append(begin)


def add_number(app: web.Application, replica: int) -> None:
    """For a replica whose requests do not come from a front of ours; before it serves.

    Answers that stream have their last words in a header, ``LAST_WORDS_HEADER``.
    """
    app[NUMBERS] = Numbers(replica)
    app.on_response_prepare.append(_say_last_words)


async def _say_last_words(request: web.Request, response: web.StreamResponse) -> None:
    if words := request.get(LAST_WORDS):
        response.headers[LAST_WORDS_HEADER] = b64encode(words).decode()


def adopt(listener: Listener, channel: FrontChannel) -> None:
    """Serve what the front has handed over by now."""
    for number, connection, pieces in channel.handed_over():
        routed = Routed(channel, number)
        listener.adopt(connection, pieces, routed.attach, partial(routed.over, CLOSED))


def leave_last_words(request: web.Request, write: Callable[[Exception], bytes]) -> None:
    """To be called before a stream is prepared: what it ends with if this process dies.

    Args:
        write: makes frames of an error; it must not depend on what follows, nor change it.
    """
    if request.app[NUMBERS].replica is not None:
        request[LAST_WORDS] = write(LOST)


#: Frames that end a stream, in case the replica dies in the middle of it.
LAST_WORDS: Final = web.RequestKey("asyncllm_last_words", bytes)


def routed_of(request: web.BaseRequest) -> Routed | None:
    """The request's connection; None if it does not come from the front."""
    return getattr(request.protocol, "routed", None)
