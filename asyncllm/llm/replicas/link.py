"""What a program and its replicas say to each other: pickled messages over a stream socket."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncllm.errors import BadRequest

#: A message has its length before it.
_LENGTH = struct.Struct("<Q")
#: Read at once, at most: about what such a socket holds.
_CHUNK = 256 << 10


class Link:
    """One end, of a program's event loop or a replica's. All methods belong to that loop.

    Both ends are this very package, started by this very program, so messages are pickled. Nothing
    waits: what the socket does not take at once is sent later.
    """

    def __init__(
        self, end: socket.socket, on_message: Callable[..., None], on_end: Callable[[], None]
    ):
        """
        Args:
            end: the link owns it.
            on_message: called with the parts of each message, in the turn of the loop in which it
                arrives; must not raise.
            on_end: called once, when the other end is gone, after its last message.
        """
        end.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._finished = False
        self._loop.add_reader(end, self._read)

    def send(self, *message: Any) -> None:
        """Nothing happens if the other end is gone."""
        if self._end.fileno() < 0:
            return
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        framed = _LENGTH.pack(len(data)) + data
        if self._unsent:
            self._unsent += framed
            return
        sent = self._sent_of(framed)
        if sent < len(framed):
            self._unsent += framed[sent:]
            self._loop.add_writer(self._end, self._send_rest)

    def finish(self) -> None:
        """Send nothing more: the other end sees that after what was sent before."""
        self._finished = True
        if not self._unsent and self._end.fileno() >= 0:
            self._shut()

    def close(self) -> None:
        """Drop what is not sent, and receive nothing more. May be called again."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._shut()  # the other end sees it, even if a process was forked that has the socket
            self._end.close()

    def _read(self) -> None:
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
            self._on_message(*pickle.loads(message))

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
        with suppress(OSError):  # the other end is gone
            self._end.shutdown(socket.SHUT_WR)


def pack(*parts: Any) -> bytes:
    """What a caller gave, for ``unpack`` at the other end.

    Raises:
        BadRequest: it has an object that cannot be sent.
    """
    try:
        return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise BadRequest(f"the request cannot be sent to a replica: {error}") from error


def unpack(data: bytes) -> tuple[Any, ...]:
    """
    Raises:
        BadRequest: it has an object of a class that only the caller's program knows.
    """
    try:
        parts: tuple[Any, ...] = pickle.loads(data)
    except Exception as error:
        raise BadRequest(f"the request cannot be read in a replica: {error}") from error
    return parts


def pack_error(error: Exception) -> tuple[type[Exception], tuple[Any, ...], dict[str, Any]]:
    """An exception whose constructor takes other arguments than it keeps."""
    return type(error), error.args, {k: v for k, v in vars(error).items() if k[:2] != "__"}


def unpack_error(packed: tuple[type[Exception], tuple[Any, ...], dict[str, Any]]) -> Exception:
    kind, args, state = packed
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error
