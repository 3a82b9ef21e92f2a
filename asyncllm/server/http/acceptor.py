"""An accept loop that takes many connections in one turn of the event loop.

uvloop accepts one connection per turn: when a thousand clients connect at once, the last one waits
for a thousand turns, in which steps run and requests are answered.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Sequence

    from asyncllm.server.http.waits import Waits
    from asyncllm.supervise.tls import Tls

log = logging.getLogger(__name__)

#: Connections accepted in one turn: about 10 ms of work, parsing their headers included.
ACCEPTS_PER_TURN: Final = 128
#: Limits of a TLS handshake, and of waiting for the client's last word when a connection closes.
HANDSHAKE_SECONDS: Final = 10.0
GOODBYE_SECONDS: Final = 2.0
#: How long to wait before accepting again after resources, such as files, have run out.
RETRY_SECONDS: Final = 0.1
#: A failure is logged again only after this time.
LOG_SECONDS: Final = 60.0

#: Errors of accept(2) on Linux about one broken connection; the next one may be fine.
_BROKEN: Final = frozenset(
    (
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOPROTOOPT,
        errno.EPROTO,
    )
)

#: struct tcp_info up to tcpi_last_data_recv: milliseconds since the peer last sent data, or since
#: the connection was established when it has sent none.
_TCP_INFO: Final = struct.Struct("8B12I")


class Acceptor:
    """Owns the listening sockets, and each accepted one until a transport owns it."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        connect: Callable[[], asyncio.Protocol],
        waits: Waits,
        tls: Tls | None = None,
    ):
        """Begin to accept.

        Args:
            connect: makes the protocol of a connection.
            waits: observes the seconds for which each connection waited to be accepted.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._connect = connect
        self._waits = waits
        self._tls = tls
        self._attaching: set[asyncio.Task[None]] = set()
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}
        self._logged_at = -LOG_SECONDS
        for listening in sockets:
            self._loop.add_reader(listening, self._accept, listening)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of the first socket."""
        host, port, *_ = self._sockets[0].getsockname()
        return host, port

    async def aclose(self) -> None:
        """Stop listening; every socket that was accepted has its connection when this returns.

        Handshakes that have not ended are broken off.
        """
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        for retry in self._retries.values():
            retry.cancel()
        if self._attaching:
            if self._tls is not None:
                for task in self._attaching:
                    task.cancel()
            await asyncio.wait(self._attaching)

    def adopt(
        self,
        connection: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        failed: Callable[[], None],
    ) -> None:
        """Serve a connection that another process has accepted.

        Args:
            connect: makes its protocol.
            failed: called if the connection cannot be served.
        """
        self._start(self._adopt(connection, connect, failed))

    async def _adopt(
        self,
        connection: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        failed: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(connect, connection)
        except Exception:
            log.exception("a connection of another process could not be served")
            connection.close()
            failed()

    def _start(self, attaching: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(attaching)
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _BROKEN:
                    continue
                self._pause(listening, error)
                return
            if (age := _age(connection)) is not None:
                self._waits.observe(age)
            self._start(self._attach(connection))

    async def _attach(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._connect, connection)
            else:
                await self._shake_hands(connection, self._tls.context)
        except Exception:
            log.exception("a connection could not be served")
            connection.close()

    async def _shake_hands(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        """Attach a connection under TLS; a client that fails to take part is nobody's fault."""
        try:
            await self._loop.connect_accepted_socket(
                self._connect,
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=GOODBYE_SECONDS,
            )
        except (OSError, asyncio.CancelledError) as error:  # SSLError and TimeoutError among them
            log.debug("a TLS handshake failed: %s", error)
            connection.close()

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Stop accepting for a while: most likely, the process has no file descriptors left."""
        now = self._loop.time()
        if now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            log.error("cannot accept connections, will keep trying: %s", error.strerror or error)
        self._loop.remove_reader(listening)
        self._retries[listening] = self._loop.call_later(RETRY_SECONDS, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        del self._retries[listening]
        self._loop.add_reader(listening, self._accept, listening)


def _age(connection: socket.socket) -> float | None:
    """Seconds that a connection has waited since its latest bytes came; None if unknown."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (AttributeError, OSError):  # not Linux; reset meanwhile
        return None
    if len(info) < _TCP_INFO.size:
        return None
    milliseconds: int = _TCP_INFO.unpack(info)[-1]
    return milliseconds / 1000
