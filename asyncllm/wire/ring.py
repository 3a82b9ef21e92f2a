"""A broadcast ring of messages in shared memory: one writer, and readers in other processes.

The memory is a memfd and the wake-ups are eventfds. Nothing has a name, so two engines never meet,
and the kernel frees everything when the last process that holds it ends, also by SIGKILL. Linux
only.

The ring is a stream of bytes: each message is its length (8 bytes) and its bytes. A message longer
than the ring therefore passes in pieces. Positions are not in the shared memory. The count that an
eventfd carries is the number of bytes that became readable, or free again. So a process touches
only bytes that a system call has announced to it. The kernel takes the eventfd's lock in both
calls, which orders the memory accesses before the one and after the other on every CPU, aarch64
included.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import sys
import threading
import time
from queue import Empty

#: Before each message: its length.
LENGTH = struct.Struct("<Q")
#: Added to an eventfd's count by a side that leaves. Counts of bytes stay below it.
LEFT = 1 << 62


class RingReader:
    """Receives each message that the writer sends from now on. For one thread."""

    def __init__(self, memory_fd: int, readable: int, freed: int):
        """
        Args:
            memory_fd, readable, freed: from ``RingWriter.fds_of``, as this process has them. The
                reader owns them, and closes them.
        """
        self._capacity = os.fstat(memory_fd).st_size
        self._memory = map_memory(memory_fd, mmap.PROT_READ)
        os.close(memory_fd)  # the map has its own
        self._readable = readable
        self._freed = freed
        for fd in (readable, freed):
            os.set_inheritable(fd, False)
        self._poll = select.poll()
        self._poll.register(readable, select.POLLIN)
        self._available = 0  # bytes announced and not read
        self._position = 0
        self._missing: int | None = None  # bytes of a message that has begun
        self._pieces: list[bytes] = []
        self._writer_left = False
        self._closed = False

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next message; None once the writer has closed and all messages have been received.

        Waits with the GIL released.

        Raises:
            queue.Empty: none was complete within ``timeout`` seconds; the next call goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self._next()) is None and not self._writer_left:
            if not self._poll.poll(milliseconds_until(deadline)):
                raise Empty
            count = os.eventfd_read(self._readable)
            self._available += count % LEFT
            self._writer_left = count >= LEFT
        return message

    def close(self) -> None:
        """Leave: a ``send`` that waits for room raises RingClosed. May be called again."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._freed, LEFT)
            os.close(self._readable)
            os.close(self._freed)
            self._memory.close()

    def _next(self) -> bytes | None:
        """Read what is available of one message; gives it once it is complete."""
        if not self._available:
            return None
        before = self._available
        if self._missing is None:
            (self._missing,) = LENGTH.unpack(self._take(LENGTH.size))  # announced in whole
        piece = self._take(min(self._missing, self._available))
        os.eventfd_write(self._freed, before - self._available)
        self._missing -= len(piece)
        self._pieces.append(piece)
        if self._missing:
            return None
        message = b"".join(self._pieces)  # no copy if there is one piece
        self._pieces.clear()
        self._missing = None
        return message

    def _take(self, size: int) -> bytes:
        start = self._position % self._capacity
        data = self._memory[start : start + size]
        if len(data) < size:
            data += self._memory[: size - len(data)]
        self._position += size
        self._available -= size
        return data


def map_memory(fd: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """All of a memfd, with its pages already there."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return mmap.mmap(fd, os.fstat(fd).st_size, flags, access)


def milliseconds_until(deadline: float | None) -> float | None:
    """For ``poll``: until a time of ``time.monotonic``."""
    return None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000


#: Holds the plan of a step with a prompt of a million tokens (4 bytes each).
DEFAULT_CAPACITY = 8 << 20


class RingClosed(Exception):
    """The ring is closed, or a reader has left."""


class ReaderBehind(TimeoutError):
    """A reader has not made room in time; ``reader`` is its number."""

    def __init__(self, reader: int, unread: int):
        super().__init__(
            f"reader {reader} of the ring is behind: it made no room in time, "
            f"and has not read {unread:,} bytes"
        )
        self.reader = reader


class RingWriter:
    """Sends each message to all readers.

    One thread sends; any thread may close.
    """

    def __init__(self, num_readers: int, capacity: int = DEFAULT_CAPACITY):
        """
        Args:
            capacity: bytes that a reader may be behind.

        Raises:
            NotImplementedError: this is not Linux.
        """
        if sys.platform != "linux":
            raise NotImplementedError("rings in shared memory need Linux (memfd and eventfd)")
        if num_readers < 1 or capacity <= LENGTH.size:
            raise ValueError(f"a ring of {capacity} bytes for {num_readers} readers is too small")
        self._capacity = capacity
        fd = os.memfd_create("asyncllm-ring")
        os.ftruncate(fd, capacity)
        self._memory = map_memory(fd)
        self._memory_fd = [fd]
        self._readable = [os.eventfd(0) for _ in range(num_readers)]
        self._freed = [os.eventfd(0) for _ in range(num_readers)]
        self._poll = select.poll()
        for fd in self._freed:
            self._poll.register(fd, select.POLLIN)
        self._end = 0  # bytes written since the start
        self._read = dict.fromkeys(self._freed, 0)  # bytes that each reader has read since
        self._closed = False
        self._leaving = threading.Lock()
        self._sending = threading.Lock()

    def fds_of(self, reader: int) -> tuple[int, int, int]:
        """What ``RingReader`` takes. They stay the writer's: a child gets copies (``pass_fds``)."""
        return self._memory_fd[0], self._readable[reader], self._freed[reader]

    def send(self, message: bytes, timeout: float | None = None) -> None:
        """Send a message; waits, with the GIL released, while the slowest reader makes no room.

        After an error the readers may have a part of the message, so the ring is closed.

        Args:
            timeout: seconds that this may take in all.

        Raises:
            ReaderBehind: the readers did not make room in time.
            RingClosed: the ring was closed, perhaps while this waited, or a reader left.
        """
        with self._sending:
            try:
                self._send(message, timeout)
            except BaseException:
                self._leave()
                raise

    def close(self) -> None:
        """End the ring: readers get what was sent in whole before, and then None.

        A ``send`` that waits in another thread ends with RingClosed. May be called again.
        """
        self._leave()
        with self._sending:
            for fd in (*self._readable, *self._freed, *self._memory_fd):
                os.close(fd)
            self._readable, self._freed, self._memory_fd = [], [], []
            self._memory.close()

    def _send(self, message: bytes, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._wait_for_room(LENGTH.size, deadline)
        self._put(LENGTH.pack(len(message)))
        if len(message) <= self._room:
            self._put(message)
            self._announce(LENGTH.size + len(message))
            return
        self._announce(LENGTH.size)
        left = memoryview(message)
        while left:
            self._wait_for_room(1, deadline)
            piece, left = left[: self._room], left[self._room :]
            self._put(piece)
            self._announce(len(piece))

    @property
    def _room(self) -> int:
        return self._capacity - (self._end - min(self._read.values()))

    def _wait_for_room(self, size: int, deadline: float | None) -> None:
        while self._closed or self._room < size:
            if self._closed:
                raise RingClosed("the ring is closed")
            freed = self._poll.poll(milliseconds_until(deadline))
            for fd, _ in freed:
                self._count_freed(fd)
            if not freed:
                slowest = min(self._read, key=lambda fd: self._read[fd])
                raise ReaderBehind(self._freed.index(slowest), self._end - self._read[slowest])

    def _count_freed(self, fd: int) -> None:
        count = os.eventfd_read(fd)
        if count >= LEFT and not self._closed:  # else our own close woke us
            raise RingClosed(f"reader {self._freed.index(fd)} has left the ring")
        self._read[fd] += count % LEFT

    def _put(self, data: bytes | memoryview) -> None:
        start = self._end % self._capacity
        first = min(len(data), self._capacity - start)
        self._memory[start : start + first] = data[:first]
        if first < len(data):
            self._memory[: len(data) - first] = data[first:]
        self._end += len(data)

    def _announce(self, size: int) -> None:
        for fd in self._readable:
            os.eventfd_write(fd, size)

    def _leave(self) -> None:
        with self._leaving:
            if not self._closed:
                self._closed = True
                for fd in (*self._readable, *self._freed):
                    os.eventfd_write(fd, LEFT)
