"""An accept loop that takes many connections in one turn of the event loop.

uvloop accepts one connection per turn: when a thousand clients connect at once, the last one waits
for a thousand turns, in which steps run and requests are answered. To accept is cheap; to serve a
connection is not, so that is spread over turns, and a health check does not wait behind the others.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from asyncllm.server.http.traffic import Waits
from asyncllm.supervise.crowd import Crowd, Use
from asyncllm.supervise.tls import Tls

#: A connection, and what it may be used for.
_Accepted = tuple[socket.socket, Use]

log = logging.getLogger(__name__)

#: Connections accepted in one turn: about 15 ms of work.
ACCEPTS_PER_TURN: Final = 1024
#: Of these, so many begin to be served in one turn: about 3 ms of work, with parsing their headers.
SERVED_PER_TURN: Final = 32
#: The beginnings of requests that are served at once.
PROBES: Final = (b"GET /health", b"GET /ready", b"GET /ping", b"GET /live", b"GET /metrics")
#: Limits of a TLS handshake, and of waiting for the client's last word when a connection closes.
HANDSHAKE_SECONDS: Final = 10.0
GOODBYE_SECONDS: Final = 2.0
#: How long to wait before accepting again after resources, such as files, have run out.
RETRY_SECONDS: Final = 0.1
#: The same when few are left, and room is being made.
CROWDED_SECONDS: Final = 0.02
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
        connect: Callable[[Use], asyncio.Protocol],
        crowd: Crowd,
        waits: Waits,
        tls: Tls | None = None,
    ):
        """Begin to accept.

        Args:
            connect: makes the protocol of a connection, which may be used for this.
            crowd: makes room for connections.
            waits: observes the seconds for which each connection waited to be accepted.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._connect = connect
        self._crowd = crowd
        self._waits = waits
        self._tls = tls
        #: Accepted, not served yet: those that had sent nothing when last looked at, and others.
        self._silent: deque[_Accepted] = deque()
        self._waiting: deque[_Accepted] = deque()
        self._is_serving = False
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
        for accepted in (*self._waiting, *self._silent):
            self._start(self._attach(*accepted))
        self._waiting.clear()
        self._silent.clear()
        if self._attaching:
            if self._tls is not None:
                for task in self._attaching:
                    task.cancel()
            await asyncio.wait(self._attaching)

    def adopt(
        self,
        connection: socket.socket,
        connect: Callable[[Use], asyncio.Protocol],
        failed: Callable[[], None],
    ) -> None:
        """Serve a connection that another process has accepted.

        Args:
            connect: makes its protocol, as ours does.
            failed: called if the connection cannot be served.
        """
        use = self._crowd.use_of(connection.fileno())
        self._start(self._adopt(connection, partial(connect, use), failed))

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
                break
            except OSError as error:
                if error.errno in _BROKEN:
                    continue
                self._tell(error)
                self._pause(listening, RETRY_SECONDS)
                break
            connection.setblocking(False)
            self._silent.append((connection, self._crowd.use_of(connection.fileno())))
            if connection.fileno() >= self._crowd.limit.probes:
                self._pause(listening, CROWDED_SECONDS)
                break
        if not self._is_serving:
            self._serve()

    def _serve(self) -> None:
        """Serve probes and some of the others; the rest in the next turns."""
        silent, self._silent = self._silent, deque()
        for connection, use in silent:
            beginning = _peek(connection)
            if beginning is None:
                self._silent.append((connection, use))
            elif beginning.startswith(PROBES):
                self._start(self._attach(connection, use))
            else:
                self._waiting.append((connection, use))
        for _ in range(SERVED_PER_TURN):
            if not (queue := self._waiting or self._silent):
                break
            self._start(self._attach(*queue.popleft()))
        self._is_serving = bool(self._waiting or self._silent)
        if self._is_serving:
            self._loop.call_soon(self._serve)

    async def _attach(self, connection: socket.socket, use: Use) -> None:
        connect = partial(self._connect, use)
        if (age := _age(connection)) is not None:
            self._waits.observe(age)
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(connect, connection)
            else:
                await self._shake_hands(connection, connect, self._tls.context)
        except Exception:
            log.exception("a connection could not be served")
            connection.close()

    async def _shake_hands(
        self,
        connection: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
    ) -> None:
        """Attach a connection under TLS; a client that fails to take part is nobody's fault."""
        try:
            await self._loop.connect_accepted_socket(
                connect,
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=GOODBYE_SECONDS,
            )
        except (OSError, asyncio.CancelledError) as error:  # SSLError and TimeoutError among them
            log.debug("a TLS handshake failed: %s", error)
            connection.close()

    def _tell(self, error: OSError) -> None:
        now = self._loop.time()
        if now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            log.error("cannot accept connections, will keep trying: %s", error.strerror or error)

    def _pause(self, listening: socket.socket, seconds: float) -> None:
        """Stop accepting for a while: the process has too few file descriptors left, or none."""
        self._loop.remove_reader(listening)
        self._retries[listening] = self._loop.call_later(seconds, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        del self._retries[listening]
        if self._crowd.is_full(listening.fileno()):
            self._pause(listening, CROWDED_SECONDS)
        else:
            self._loop.add_reader(listening, self._accept, listening)


def _peek(connection: socket.socket) -> bytes | None:
    """What its client has sent first; None if that has not arrived, empty at the end."""
    try:
        return connection.recv(16, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


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
