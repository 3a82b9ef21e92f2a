"""Bytes between the event loop and another process: a stream socket. Linux only.

A message is its length (8 bytes) and its bytes. On the loop nothing waits: what the socket does not
take at once is sent later. ``docs/why/executor-process.md`` compares this with rings.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from queue import Empty

from asyncllm.wire.channel import FLUSH
from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import StepResult, encode

_LENGTH = struct.Struct("<Q")
#: Read at once, at most: about what such a socket holds.
_CHUNK = 256 << 10


class SocketChannel:
    """A ``LeaderChannel`` in a process of its own; the loop has a ``SocketLink``.

    One thread receives and posts. It waits with the GIL released.

    Args:
        end: the process's end of the socket, which it waits for.
        heartbeat: where the thread says what it does.
    """

    def __init__(self, end: socket.socket, heartbeat: Heartbeat):
        self.heartbeat = heartbeat
        self._end = end
        self._woken = os.eventfd(0)
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def receive(self, timeout: float | None = None) -> bytes | None:
        ready = self._poll.poll(None if timeout is None else timeout * 1000)
        if not ready:
            raise Empty
        if any(fd == self._woken for fd, _ in ready):
            os.eventfd_read(self._woken)
            return FLUSH
        length = self._exactly(_LENGTH.size)
        return None if length is None else self._exactly(*_LENGTH.unpack(length))

    def launched(self) -> None:
        pass  # the loop is in another process

    def post(self, result: StepResult) -> None:
        self._end.sendall(_framed(encode(result)))

    def _exactly(self, size: int) -> bytes | None:
        """The next bytes; None once the loop has ended its side."""
        data = self._end.recv(size, socket.MSG_WAITALL)
        while len(data) < size:  # a signal came, or the end
            more = self._end.recv(size - len(data), socket.MSG_WAITALL)
            if not more:
                return None
            data += more
        return data


class SocketLink:
    """The event loop's end of a socket. All methods belong to the loop.

    Args:
        end: its end; the link owns it.
        on_message: called with each message, in the turn of the loop in which it arrives.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: socket.socket,
        on_message: Callable[[bytes], None],
        on_end: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            on_end: called once the other side has closed its end, after its last message.
        """
        end.setblocking(False)
        self._loop = loop
        self._end = end
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._finished = False
        loop.add_reader(end, self.read)

    def send(self, message: bytes) -> None:
        """Send a message; never waits. Ignored once the other side has ended."""
        if self._end.fileno() < 0:
            return
        framed = _framed(message)
        if self._unsent:
            self._unsent += framed
            return
        sent = self._sent_of(framed)
        if sent < len(framed):
            self._unsent += framed[sent:]
            self._loop.add_writer(self._end, self._send_rest)

    def finish(self) -> None:
        """End this side: the other one sees it after what was sent before."""
        self._finished = True
        if not self._unsent and self._end.fileno() >= 0:
            self._shut()

    def close(self) -> None:
        """Drop what is not sent, and receive nothing more. May be called again."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._shut()  # the other side sees it, even if a process was forked that has the socket
            self._end.close()

    def read(self) -> None:
        """Receive what has arrived; the loop calls it."""
        while self._end.fileno() >= 0:
            try:
                data = self._end.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:  # a process that was killed had not read everything
                data = b""
            if not data:
                self.close()
                self._on_end()
                return
            self._received += data
            self._take_messages()
            if len(data) < _CHUNK:
                return

    def _take_messages(self) -> None:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            message = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            self._on_message(message)

    def _sent_of(self, data: bytes | bytearray) -> int:
        """How many bytes the socket takes now; all of them, if nobody will read them."""
        try:
            return self._end.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _send_rest(self) -> None:
        del self._unsent[: self._sent_of(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._end)
            if self._finished:
                self._shut()

    def _shut(self) -> None:
        with suppress(OSError):  # the other side has ended
            self._end.shutdown(socket.SHUT_WR)


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message
