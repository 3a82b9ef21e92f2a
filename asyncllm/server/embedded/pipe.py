"""Pipe: a connection within this process, in the place of a socket's transport."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable

#: As asyncio's transports: the writer is paused above the first, and resumed at the second.
HIGH_WATER: Final = 64 * 1024
LOW_WATER: Final = HIGH_WATER // 4


class Pipe(asyncio.Transport):
    """The server's transport. The client's end of it is ``send``, ``receive`` and ``disconnect``.

    What the client has not received yet counts as unsent, so a slow client is treated as one on a
    socket is.
    """

    def __init__(self, connect: Callable[[], asyncio.Protocol], peer: tuple[str, int] | None):
        """
        Args:
            connect: makes the server's protocol.
            peer: the client's host and port, as far as they are known.
        """
        super().__init__({"peername": peer})
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()
        self._closing = False
        self._lost = False
        self._aborted = False
        self._accepts = True  # the server reads
        self._paused = False  # the server should not write
        self._high, self._low = HIGH_WATER, LOW_WATER
        self._changed = asyncio.Event()
        self._protocol = connect()
        # As on a socket, handlers see none of the client's context variables.
        contextvars.Context().run(self._protocol.connection_made, self)

    # -- the client's end ------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Give the server bytes; nothing happens once it has closed."""
        if not self._closing:
            self._protocol.data_received(data)

    async def writable(self) -> bool:
        """Wait until the server reads; False if it has answered, or closed, instead."""
        while not (self._accepts or self._unread or self._closing):
            await self._change()
        return not (self._unread or self._closing)

    async def receive(self) -> bytes:
        """All that the server has written; empty at the end.

        Raises:
            ConnectionResetError: the connection was aborted.
        """
        while not self._unread:
            if self._aborted:
                raise ConnectionResetError("the connection was closed")
            if self._closing:
                return b""
            await self._change()
        data = bytes(self._unread)
        self._unread.clear()
        if self._paused:
            self._paused = False
            if not self._lost:
                self._protocol.resume_writing()
        return data

    def disconnect(self) -> None:
        """The client leaves; idempotent."""
        self.abort()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # -- the server's end: what asyncio.Transport says -------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing:
            return
        self._unread += data
        if len(self._unread) > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()
        self._changed.set()

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return len(self._unread)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """No more is written; the client can still receive what was."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._lose)
            self._changed.set()

    def abort(self) -> None:
        if not self._lost:
            self._aborted = True
            self._unread.clear()
        self.close()

    def _lose(self) -> None:
        self._lost = True
        self._protocol.connection_lost(None)

    def pause_reading(self) -> None:
        self._accepts = False

    def resume_reading(self) -> None:
        self._accepts = True
        self._changed.set()

    def is_reading(self) -> bool:
        return self._accepts and not self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol
