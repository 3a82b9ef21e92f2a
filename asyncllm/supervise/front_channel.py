"""What a replica and the process before it tell each other of connections.

That process, the front, keeps its own end of every connection until a replica is done with it.
A request is not always about the replica that reads it. So a replica can have the front ask all of
them, and can send a request on to the one that has what it names.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from asyncllm.supervise.child import HAND_OVER, LEAVING, MESSAGE_BYTES, PING, READY, received, taken

#: From a replica, followed by a connection's number: its answer begins. Then where it begins in the
#: stream of what is ``sent`` to the client; and bytes that end it should the replica die.
BEGUN: Final = b"b"
#: The answer is written, and the connection is free for another request; the replica has left it.
FREE: Final = b"f"
#: The answer is written, but the replica keeps the connection, as it may have more of the client.
#: Then where in the stream another answer would begin; or ``NOWHERE``, if the connection ends.
KEPT: Final = b"k"
#: The connection is closed.
CLOSED: Final = b"c"
#: Another replica should answer the request; this one cannot.
MOVED: Final = b"m"
#: Followed by a replica's index in one byte, and by the length of a request: that replica should
#: answer the request that follows; it and what comes after it are to be read in place of all that
#: has come of the connection so far.
HOME: Final = b"w"
#: With a connection to this replica, followed by what all are asked and by a request: the front is
#: to write the answer of all to that connection. What is asked ends with a line feed.
ASK: Final = b"q"

#: An interim response, which clients of HTTP/1.1 skip; and how many of them a client may get.
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
MOST_INTERIM: Final = 6

#: Bytes of a connection's number, and of a place in its stream. Connections with number 0 are not
#: reported of.
NUMBER_BYTES: Final = 8
NOWHERE: Final = b"\xff" * NUMBER_BYTES
#: Then how many of the bytes are to be read first.
FIRST_BYTES: Final = 4
#: A request up to this size comes in the message that hands it over; a larger one in a file.
INLINE_BYTES: Final = 8 * 1024
_FIRST_AT: Final = 1 + NUMBER_BYTES
_REQUEST_AT: Final = _FIRST_AT + FIRST_BYTES
#: Before the next attempt, when the other side does not take messages as fast as they are sent.
RETRY_SECONDS: Final = 0.002
#: Of ``tcp_info`` in linux/tcp.h. At this place: bytes that are acknowledged, then those received.
TCP_INFO_BYTES, ACKNOWLEDGED_AT = 136, 120
#: Errors of sending that pass.
FULL: Final = (errno.EAGAIN, errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def numbered(kind: bytes, number: int) -> bytes:
    return kind + number.to_bytes(NUMBER_BYTES, "big")


def number_of(message: bytes) -> int:
    return int.from_bytes(message[1 : 1 + NUMBER_BYTES], "big")


def sent(connection: int) -> int | None:
    """How many bytes were written to a connection so far, by whatever process.

    The kernel knows: those that the client has, and those that it does not have yet. None where it
    does not count.
    """
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, connection)
    try:
        info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        acknowledged, received = struct.unpack_from("=QQ", info, ACKNOWLEDGED_AT)
        if received:  # a client has sent a request, so this kernel counts
            unacknowledged = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
            return int(acknowledged) + int.from_bytes(unacknowledged, sys.byteorder)
    except (OSError, struct.error):
        pass
    finally:
        opened.detach()  # it is not closed here
    return None


def is_interim(num_bytes: int) -> bool:
    """Whether so many bytes are interim responses, or nothing at all.

    A replica writes them before its answer begins: to ask for a body, or to find out whether a
    client that has closed its side still waits. Any answer is longer than the most of them here.
    """
    num_responses, rest = divmod(num_bytes, len(CONTINUE))
    return rest == 0 and 0 <= num_responses <= MOST_INTERIM


class HandedOver(NamedTuple):
    number: int
    connection: socket.socket
    pieces: tuple[bytes, bytes]


def packed(start: bytes, request: bytes) -> tuple[bytes, list[int]]:
    """A message with a request, which is in a file if it is large; the file is the caller's.

    Raises:
        OSError: this process has too many open files.
    """
    if len(request) <= INLINE_BYTES:
        return start + request, []
    file = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as writable:
            writable.write(request)
    except BaseException:
        os.close(file)
        raise
    return start, [file]


class FrontChannel:
    """A replica's end; it belongs to the event loop. Nothing blocks, and nothing is lost."""

    def __init__(self, channel: socket.socket, how: Callable[[], bytes]):
        """
        Args:
            how: says how the replica is, in JSON.
        """
        self._channel = channel
        self._how = how
        channel.setblocking(False)
        self._unsent: deque[tuple[bytes, list[int]]] = deque()

    def handed_over(self) -> Iterator[HandedOver]:
        """The requests that have come by now; answers pings."""
        for message, files in received(self._channel):
            if message == PING:
                self._send(PING + self._how())
            elif message.startswith(HAND_OVER) and files:
                first, request = message[_FIRST_AT:_REQUEST_AT], message[_REQUEST_AT:]
                if len(files) == 2:
                    connection, request = taken(files)
                else:
                    connection = socket.socket(fileno=files[0])
                count = int.from_bytes(first, "big")
                pieces = request[:count], request[count:]
                yield HandedOver(number_of(message), connection, pieces)
            elif message.startswith(HAND_OVER):  # no file descriptor is free here
                self.tell(MOVED, number_of(message))

    def ready(self, about: str) -> None:
        """The model is loaded; ``about`` says what it is, in a line."""
        self._send(READY + about.encode()[: MESSAGE_BYTES - 1])

    def leaving(self) -> None:
        """Other replicas should get the requests that come now."""
        self._send(LEAVING)

    def tell(self, kind: bytes, number: int, more: bytes = b"") -> None:
        if number:
            self._send(numbered(kind, number) + more)

    def send_home(self, number: int, replica: int, request: bytes, more: bytes) -> None:
        """
        Args:
            more: what has come after the request.

        Raises:
            OSError: this process has too many open files.
        """
        start = bytes([replica]) + len(request).to_bytes(FIRST_BYTES, "big")
        self._send(*packed(numbered(HOME, number) + start, request + more))

    def ask(self, what: str, connection: socket.socket, request: bytes) -> None:
        """
        Args:
            connection: for the answer; it belongs to this object now.
            request: a whole one.

        Raises:
            OSError: this process has too many open files.
        """
        try:
            message, files = packed(ASK + what.encode() + b"\n", request)
        except OSError:
            connection.close()
            raise
        self._send(message, [connection.detach(), *files])

    def _send(self, message: bytes, files: Sequence[int] = ()) -> None:
        """The files belong to this object now."""
        self._unsent.append((message, list(files)))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            message, files = self._unsent[0]
            try:
                socket.send_fds(self._channel, [message], files)
            except OSError as error:
                if error.errno in FULL:
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)
                    return
                # The front is gone, and this process is about to be.
            self._unsent.popleft()
            for file in files:
                os.close(file)
