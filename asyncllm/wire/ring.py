"""A broadcast ring of messages in shared memory: one writer, and readers in other processes.

The memory is a memfd and the wake-ups are eventfds. Nothing has a name, so two engines never meet,
and the kernel frees everything when the last process that holds it ends, also by SIGKILL. Linux
only. ``RingReader`` is in ``ring_reader.py``.

The ring is a stream of bytes: each message is its length (8 bytes) and its bytes. A message longer
than the ring therefore passes in pieces. Positions are not in the shared memory. The count that an
eventfd carries is the number of bytes that became readable, or free again. So a process touches
only bytes that a system call has announced to it. The kernel takes the eventfd's lock in both
calls, which orders the memory accesses before the one and after the other on every CPU, aarch64
included.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time

from asyncllm.wire.ring_reader import LEFT, LENGTH, map_memory, milliseconds_until

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
