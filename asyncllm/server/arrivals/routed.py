"""Connections of a replica: the front reads a request, and gives the socket to a replica.

The front keeps an end of its own. So a replica that has answered only says so and closes its end,
and the connection of one that dies is still there: for its last words, or for another replica.
"""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiohttp import HttpVersion11, hdrs, web

from asyncllm.errors import EngineDead
from asyncllm.server.arrivals.names import NUMBERS, Numbers
from asyncllm.server.http.connection import KIND, Connection
from asyncllm.server.http.hand_over import HAND_OVER
from asyncllm.supervise.front_channel import BEGUN, CLOSED, FREE, KEPT, MOVED

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.server.http.connection import Watchers
    from asyncllm.server.http.listener import Listener
    from asyncllm.supervise.front_channel import FrontChannel

#: Further bytes of a head are not looked at; such a connection is not given back.
MOST_HEAD: Final = 64 * 1024
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
        self._head_bytes: int | None = None
        self._beginning = b""
        self._end = b""
        self._num_received = 0
        self._is_over = False

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
        if self._head_bytes is None and len(self._beginning) < MOST_HEAD:
            start = max(0, len(self._beginning) - 3)
            self._beginning += data
            if (end := self._beginning.find(b"\r\n\r\n", start)) >= 0:
                self._head_bytes, self._beginning = end + 4, b""

    def begun(self, last_words: bytes) -> None:
        self._tell(BEGUN, last_words)

    def kept(self) -> None:
        self._tell(KEPT)

    def over(self, kind: bytes) -> None:
        """The replica has nothing more to do with the connection; the first call counts."""
        self._tell(kind)
        self._is_over = True

    def goes_home(self, replica: int, request: bytes) -> None:
        """Another replica answers, and the connection is its from now on.

        Raises:
            OSError: this process has too many open files.
        """
        self.channel.send_home(self._number, replica, request)
        self._is_over = True

    def ends_with(self, request: web.BaseRequest) -> bool:
        """Whether the client has sent all of this request, and no byte after it.

        Only true of the first request, or of one in chunks.
        """
        if not request.content.is_eof():
            return False
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

    def __init__(self, manager: web.Server, watchers: Watchers, **options: Any):
        super().__init__(manager, watchers, **options)
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
            if (
                not is_reset
                and finished.keep_alive
                and self.half_closed is None
                and transport.get_write_buffer_size() == 0
                and self.ends_with(request)
            ):
                transport.abort()  # the front has an end, too: the connection stays open
                routed.over(FREE)
            else:
                routed.kept()
        return finished, is_reset

    def ends_with(self, request: web.BaseRequest) -> bool:
        """Whether nothing is lost if another process reads on after this request."""
        if self._messages or self._upgraded or self.routed is None:
            return False
        return self.routed.ends_with(request)


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
        protocol, transport = request.protocol, request.transport
        if transport is None or transport.is_closing() or not self._has_died():
            return False
        if not isinstance(protocol, RoutedConnection) or (routed := protocol.routed) is None:
            return False
        if request.writer.output_size > 0 or not protocol.ends_with(request):
            return False
        transport.abort()
        routed.over(MOVED)
        return True


async def begin(request: web.Request, response: web.StreamResponse) -> None:
    """An ``on_response_prepare`` signal: the request cannot move any more."""
    routed = routed_of(request)
    if routed is not None:
        words = request.get(LAST_WORDS, b"")
        if words and request.version >= HttpVersion11:
            words = b"%x\r\n%b\r\n0\r\n\r\n" % (len(words), words)
        routed.begun(words)


#: In base 64.
LAST_WORDS_HEADER: Final = "X-Asyncllm-Last-Words"

#: Which of several replicas this is, and how many numbers they have.
REPLICA: Final = web.AppKey("asyncllm_replica", int)
REPLICAS: Final = web.AppKey("asyncllm_replicas", int)


def add_routing(
    app: web.Application, replica: int, count: int, restarts: int, has_died: Callable[[], bool]
) -> None:
    """To be called before the application serves.

    Args:
        count: how many replicas there are.
        restarts: how many processes have died in the place of this one.
        has_died: whether requests that are not answered yet should go elsewhere.
    """
    app[REPLICA], app[REPLICAS] = replica, count
    app[NUMBERS] = Numbers(replica, restarts)
    app[KIND] = RoutedConnection
    app[HAND_OVER] = Leaving(has_died)
    app.on_response_prepare.append(begin)


def add_number(app: web.Application, replica: int) -> None:
    """For a replica whose requests do not come from a front of ours; before it serves.

    Answers that stream have their last words in a header, ``LAST_WORDS_HEADER``.
    """
    app[REPLICA] = replica
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
    if REPLICA in request.app:
        request[LAST_WORDS] = write(LOST)


#: Frames that end a stream, in case the replica dies in the middle of it.
LAST_WORDS: Final = web.RequestKey("asyncllm_last_words", bytes)


def routed_of(request: web.BaseRequest) -> Routed | None:
    """The request's connection; None if it does not come from the front."""
    return getattr(request.protocol, "routed", None)
