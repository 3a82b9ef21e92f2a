"""The reading side of the ring of ``asyncllm/wire/ring.py``, and what both sides share."""

from __future__ import annotations

import mmap
import os
import select
import struct
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
