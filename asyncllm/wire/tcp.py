"""Messages between two machines: a TCP connection whose ends have proved that they share a token.

A message is its length (8 bytes) and its bytes. They are not encrypted.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from typing import Final

_LENGTH: Final = struct.Struct("<Q")
#: Read at once, at most.
_CHUNK: Final = 256 << 10
#: Who connects sends the first half, and who accepts answers with the second one.
TOKEN_BYTES: Final = 64
#: Seconds that a caller has for its half.
TOKEN_SECONDS: Final = 2.0
#: Seconds until a call must be answered: a few strangers may have come before.
CONNECT_SECONDS: Final = 20.0


class TcpLink:
    """One end of a connection. One thread receives, and any thread sends.

    Args:
        end: a blocking socket; the link owns it.
    """

    def __init__(self, end: socket.socket):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._received = bytearray()
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send a message; waits while the other side reads nothing. Ignored once it has ended."""
        with self._sending, suppress(OSError):
            self._end.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, silence: float | None = None) -> bytes | None:
        """The next message; None once the other side has ended, or the connection is broken.

        Raises:
            TimeoutError: not one byte has come for ``silence`` seconds.
        """
        while (message := self._take()) is None:
            if not self._poll.poll(None if silence is None else silence * 1000):
                raise TimeoutError
            try:
                data = self._end.recv(_CHUNK)
            except OSError:
                return None
            if not data:
                return None
            self._received += data
        return message

    def give_up_after(self, seconds: float) -> None:
        """Break the connection when the other machine has not confirmed what was sent for so long.

        Its kernel confirms it, also when its process hangs.
        """
        milliseconds = int(seconds * 1000)
        self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def finish(self) -> None:
        """Send nothing more, from any thread; a ``send`` that waits gives up. The other side's
        ``receive`` returns None after what was sent before.
        """
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Leave; no other thread may use the link any more."""
        self._end.close()

    def _take(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message


def listen(host: str) -> socket.socket:
    """A socket that listens at this address alone, on a port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def accept(listening: socket.socket, token: bytes) -> TcpLink:
    """Wait for whoever has the token. A stranger holds it up for ``TOKEN_SECONDS`` at most."""
    expected, ours = _halves(token)
    while True:
        end, _ = listening.accept()
        with suppress(OSError), ExitStack() as on_stranger:
            on_stranger.callback(end.close)
            if hmac.compare_digest(_first(end, len(expected), TOKEN_SECONDS), expected):
                end.sendall(ours)
                on_stranger.pop_all()
                end.settimeout(None)
                return TcpLink(end)


def connect(address: tuple[str, int], token: bytes) -> TcpLink:
    """Connect to ``accept``.

    Raises:
        OSError: nobody with the token listens there.
    """
    ours, expected = _halves(token)
    with ExitStack() as on_error:
        end = socket.create_connection(address, CONNECT_SECONDS)
        on_error.callback(end.close)
        end.sendall(ours)
        if not hmac.compare_digest(_first(end, len(expected), CONNECT_SECONDS), expected):
            raise ConnectionRefusedError("it does not know us")
        on_error.pop_all()
    end.settimeout(None)
    return TcpLink(end)


def _halves(token: bytes) -> tuple[bytes, bytes]:
    assert len(token) == TOKEN_BYTES
    return token[: TOKEN_BYTES // 2], token[TOKEN_BYTES // 2 :]


def _first(end: socket.socket, size: int, seconds: float) -> bytes:
    """The first bytes of a connection; fewer if it ends.

    Raises:
        OSError: they do not come in time.
    """
    deadline = time.monotonic() + seconds
    data = b""
    while len(data) < size:
        end.settimeout(max(0.001, deadline - time.monotonic()))
        if not (more := end.recv(size - len(data))):
            break
        data += more
    return data
