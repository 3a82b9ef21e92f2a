"""The serving process's side of supervision, and how it is forked."""

from __future__ import annotations

import os
import signal
import socket
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Final

from asyncllm.supervise.signals import HANDLED, STOPS
from asyncllm.supervise.standard_files import flush

#: What the serving process tells its parent: it wants to accept connections, for which it needs
#: the parent's word; and it has loaded the model, followed by a line about it.
ACCEPT: Final = b"a"
READY: Final = b"r"
#: It drains: others should get the requests that come now.
LEAVING: Final = b"l"
#: In both directions, with two file descriptors: a connection, and a file with its request. To one
#: of several servers it goes with the number of the connection, see ``front_channel``. From a
#: server, also with one: an idle connection.
HAND_OVER: Final = b"h"
#: From a server: it has taken the oldest connection that it was given, or it could not.
TAKEN: Final = b"k"
NOT_TAKEN: Final = b"n"
#: With the descriptor of a file: what a server that is started again gets as ``Parent.memory``. To
#: one of several that is about to accept connections: what the others serve by by now.
REMEMBER: Final = b"o"
#: It has read its configuration again, or could not, after a SIGHUP.
RELOADED: Final = b"g"
#: It would be worth it to have a standby for this server.
STANDBY: Final = b"s"
#: To a standby, followed by how many servers have died, with the descriptor of what the last of
#: them had remembered: it is the server now.
TAKE_OVER: Final = b"t"
#: In both directions: does the other process react? A replica adds how it is, in JSON.
PING: Final = b"p"
#: Before the next attempt, when the parent does not take messages as fast as they are sent.
SEND_SECONDS: Final = 0.01
#: Most bytes of a message.
MESSAGE_BYTES: Final = 16 * 1024


@dataclass(eq=False)
class Parent:
    """What a serving process inherits from the one that supervises it.

    Attributes:
        sockets: listening; both processes have them.
        restarts: how many servers have died before this one.
        replica: which of several servers this is, and that one does not accept connections; None
            for the only one.
        num_replicas: how many servers there are.
        channel: to the parent; it keeps the boundaries of messages.
        memory: what a server before this one had it remember last; empty if there was nothing.
        is_standby: this process is to call ``stand_by``, and has no restarts and memory before.
        took_over_at: when a standby became the server, by ``time.monotonic``.
    """

    sockets: Sequence[socket.socket]
    channel: socket.socket
    restarts: int = 0
    replica: int | None = None
    memory: bytes = b""
    _: KW_ONLY
    num_replicas: int = 1
    is_standby: bool = False
    took_over_at: float | None = None

    def stand_by(self) -> None:
        """Returns when this process is to serve; ends it if there will be nothing to do."""
        message, files = PING, list[int]()
        while message == PING:
            message, files = receive(self.channel, flags=0)
            if message == PING:
                self._tell(PING)
        if not message:  # the parent is gone
            os._exit(0)
        self.took_over_at = time.monotonic()
        self.restarts = int(message.removeprefix(TAKE_OVER))
        for file in files:
            self.memory = content_of(file)
            os.close(file)

    def remember(self, data: bytes) -> None:
        """Have the parent keep this for the next server. Waits while it has much to read."""
        file = os.memfd_create("remembered", os.MFD_CLOEXEC)
        try:
            with open(file, "wb", closefd=False) as writable:
                writable.write(data)
            with suppress(OSError):  # the parent is gone, and this process is about to be
                while not self._sent(REMEMBER, file):
                    time.sleep(SEND_SECONDS)
        finally:
            os.close(file)

    def _sent(self, message: bytes, file: int) -> bool:
        try:
            send(self.channel, message, [file])
        except BlockingIOError:
            return False
        return True

    def take_over(self) -> None:
        """Returns when the parent has stopped accepting connections; it does that at once.

        ``memory`` is then what other servers serve by, if there are others.
        """
        self._tell(ACCEPT)
        message = REMEMBER
        with suppress(OSError):
            while message == REMEMBER:
                message, files = receive(self.channel, flags=0)
                for file in files:
                    self.memory = content_of(file)
                    os.close(file)

    def ready(self, about: str) -> None:
        """The model is loaded; ``about`` says what it is, in a line."""
        self._tell(READY + about.encode()[: MESSAGE_BYTES - 1])

    def reloaded(self) -> None:
        """A SIGHUP has been heeded."""
        self._tell(RELOADED)

    def ask_for_standby(self) -> None:
        """Have a process stand by, to be the next server."""
        self._tell(STANDBY)

    def hand_over(self, *files: int) -> None:
        """Give the parent a connection.

        Args:
            files: the connection, which is idle; or one for the next server, and a file with its
                request.

        Raises:
            OSError: it cannot take any more.
        """
        send(self.channel, HAND_OVER, files)

    def handed_over(self) -> Iterator[tuple[socket.socket, bytes]]:
        """The connections from the server before that have come by now, and their requests.

        The parent keeps each of them until the next one is asked for here, or the iteration ends.
        """
        for message, files in received(self.channel):
            if message != HAND_OVER:
                continue
            if len(files) == 2:
                yield taken(files)
            self._tell(TAKEN if files else NOT_TAKEN)

    def fileno(self) -> int:
        """Readable when ``handed_over`` has something."""
        return self.channel.fileno()

    def close(self) -> None:
        self.channel.close()

    def _tell(self, message: bytes) -> None:
        with suppress(OSError):  # the parent is gone, and this process is about to be
            self.channel.send(message)


def received(channel: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """The messages that have come by now, with their file descriptors."""
    while True:
        try:
            message, files = receive(channel)
        except OSError:
            return
        if not message:
            return
        yield message, files


def receive(channel: socket.socket, *, flags: int = socket.MSG_DONTWAIT) -> tuple[bytes, list[int]]:
    """The next message, and its file descriptors; empty at the end of the other process.

    There are none if this process could not take all of them: it has too many open files.

    Raises:
        OSError: no message has come yet.
    """
    room = socket.CMSG_LEN(2 * array("i").itemsize)
    flags |= socket.MSG_CMSG_CLOEXEC
    try:
        found = channel.recvmsg(MESSAGE_BYTES, room, flags)
    except ConnectionResetError:
        # The other process has ended, and had not read everything. What it said is still there.
        found = channel.recvmsg(MESSAGE_BYTES, room, flags)
    message, ancillary, told, _ = found
    files = array("i")
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    if told & socket.MSG_CTRUNC:
        for file in files:
            os.close(file)
        return message, []
    return message, list(files)


def send(channel: socket.socket, message: bytes, files: Sequence[int]) -> None:
    """Send it with file descriptors, at once. (The flags of ``socket.send_fds`` have no effect.)

    Raises:
        OSError: the channel is full for now, or the other process has ended.
    """
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))
    channel.sendmsg([message], [rights] if files else [], socket.MSG_DONTWAIT)


def taken(files: list[int]) -> tuple[socket.socket, bytes]:
    """A connection, and the content of the file with its request."""
    request = content_of(files[1])
    os.close(files[1])
    return socket.socket(fileno=files[0]), request


def content_of(file: int) -> bytes:
    """All of a file, which stays open."""
    return os.pread(file, os.fstat(file).st_size, 0)


def fork() -> tuple[int, socket.socket]:
    """Fork this process, which must have one thread. The new process dies with it.

    Returns:
        As ``os.fork`` does, and this process's end of a channel to the other one, which keeps the
        boundaries of messages.

    Raises:
        OSError: the system allows no new process, or no file descriptor for it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flush()
    me = os.getpid()
    # No handler of ours may run in the new process.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        ours.close()
        _begin(me)
        return 0, theirs
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    theirs.close()
    ours.setblocking(False)
    return pid, ours


def _begin(parent: int) -> None:
    """In the new process."""
    from asyncllm.system.child_process import die_with

    die_with(parent)
    for number in (*STOPS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can read its configuration again
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
