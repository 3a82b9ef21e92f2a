"""Connections of a replica: the front reads each request's head, and gives the socket to a replica.

The front keeps an end of its own. So a replica that has answered only says so and closes its end,
and the connection of one that dies is still there: for its last words, or for another replica.
"""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiohttp import HttpVersion11, hdrs, web

from asyncllm.errors import EngineDead
from asyncllm.server.http.connection import KIND, Connection
from asyncllm.server.http.hand_over import HAND_OVER
from asyncllm.supervise.front_channel import BEGUN, CLOSED, FREE, KEPT, MOVED

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.server.http.connection import Listener, Watchers
    from asyncllm.supervise.front_channel import FrontChannel

#: What a client that is promised a stream is told if the replica dies.
LOST: Final = EngineDead("the replica that was answering has died")


class Routed:
    """One connection as the front knows it; tells the front what becomes of it."""

    def __init__(self, channel: FrontChannel, number: int, request: bytes):
        """
        Args:
            request: the bytes that the front has read.
        """
        self._channel = channel
        self._number = number
        self._head_bytes = request.find(b"\r\n\r\n") + 4
        self._num_received = 0
        self._is_over = False

    def attach(self, protocol: Connection) -> None:
        """The connection is served by this protocol."""
        if isinstance(protocol, RoutedConnection):
            protocol.routed = self

    def received(self, num_bytes: int) -> None:
        self._num_received += num_bytes

    def begun(self, last_words: bytes) -> None:
        self._tell(BEGUN, last_words)

    def kept(self) -> None:
        self._tell(KEPT)

    def over(self, kind: bytes) -> None:
        """The replica has nothing more to do with the connection; the first call counts."""
        self._tell(kind)
        self._is_over = True

    def has_sent_one(self, request: web.BaseRequest) -> bool:
        """Whether the client has sent this first request, and no byte of another."""
        if hdrs.TRANSFER_ENCODING in request.headers or not request.content.is_eof():
            return False
        return self._num_received == self._head_bytes + (request.content_length or 0)

    def _tell(self, kind: bytes, more: bytes = b"") -> None:
        if not self._is_over:
            self._channel.tell(kind, self._number, more)


class RoutedConnection(Connection):
    """Gives its client back to the front after an answer.

    Attributes:
        routed: what the front is told; None before the connection is known.
    """

    __slots__ = ("routed",)

    def __init__(self, manager: web.Server, watchers: Watchers, **options: Any):
        super().__init__(manager, watchers, **options)
        self.routed: Routed | None = None

    def data_received(self, data: bytes) -> None:
        if self.routed is not None:
            self.routed.received(len(data))
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
            if (
                not is_reset
                and finished.keep_alive
                and self.half_closed is None
                and transport.get_write_buffer_size() == 0
                and routed.has_sent_one(request)
            ):
                transport.abort()  # the front has an end, too: the connection stays open
                routed.over(FREE)
            else:
                routed.kept()
        return finished, is_reset


class Leaving:
    """Leaves requests that an engine took with it to another replica."""

    def __init__(self, has_died: Callable[[], bool]):
        """
        Args:
            has_died: whether another replica should answer.
        """
        self._has_died = has_died

    def pass_on(self, request: web.Request) -> bool:
        """The request's connection goes back; False if it must be answered here."""
        routed, transport = _routed(request), request.transport
        if routed is None or transport is None or transport.is_closing() or not self._has_died():
            return False
        if request.writer.output_size > 0 or not routed.has_sent_one(request):
            return False
        transport.abort()
        routed.over(MOVED)
        return True


async def begin(request: web.Request, response: web.StreamResponse) -> None:
    """An ``on_response_prepare`` signal: the request cannot move any more."""
    routed = _routed(request)
    if routed is not None:
        words = request.get(LAST_WORDS, b"")
        if words and request.version >= HttpVersion11:
            words = b"%x\r\n%b\r\n0\r\n\r\n" % (len(words), words)
        routed.begun(words)


#: In base 64.
LAST_WORDS_HEADER: Final = "X-Asyncllm-Last-Words"

#: Which of several replicas this is.
REPLICA: Final = web.AppKey("asyncllm_replica", int)


def add_routing(app: web.Application, replica: int, has_died: Callable[[], bool]) -> None:
    """To be called before the application serves."""
    app[REPLICA] = replica
    app[KIND] = RoutedConnection
    app[HAND_OVER] = Leaving(has_died)
    app.on_response_prepare.append(begin)


def add_number(app: web.Application, replica: int) -> None:
    """For a replica whose requests do not come from a front of ours; before it serves.

    Answers that stream have their last words in a header, ``LAST_WORDS_HEADER``.
    """
    app[REPLICA] = replica
    app.on_response_prepare.append(_say_last_words)


async def _say_last_words(request: web.Request, response: web.StreamResponse) -> None:
    if words := request.get(LAST_WORDS):
        response.headers[LAST_WORDS_HEADER] = b64encode(words).decode()


def adopt(listener: Listener, channel: FrontChannel) -> None:
    """Serve what the front has handed over by now."""
    for number, connection, request in channel.handed_over():
        routed = Routed(channel, number, request)
        listener.adopt(connection, request, routed.attach, partial(routed.over, CLOSED))


def leave_last_words(request: web.Request, write: Callable[[Exception], bytes]) -> None:
    """To be called before a stream is prepared: what it ends with if this process dies.

    Args:
        write: makes frames of an error; it must not depend on what follows, nor change it.
    """
    if REPLICA in request.app:
        request[LAST_WORDS] = write(LOST)


#: Frames that end a stream, in case the replica dies in the middle of it.
LAST_WORDS: Final = web.RequestKey("asyncllm_last_words", bytes)


def _routed(request: web.Request) -> Routed | None:
    return getattr(request.protocol, "routed", None)
