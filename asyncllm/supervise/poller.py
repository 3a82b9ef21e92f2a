"""A small event loop: callbacks by file descriptor. asyncio would double the process's memory."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Poller:
    """Forked processes share it: they must do nothing but close it."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}

    def add(self, file: HasFileno, callback: Callable[[], object], events: int = READ) -> None:
        """Call it whenever the file is ready, or broken. Adding a file again replaces that."""
        number = file.fileno()
        change = self._poll.modify if number in self._callbacks else self._poll.register
        change(number, events)
        self._callbacks[number] = callback

    def remove(self, file: HasFileno) -> None:
        """Idempotent; the file must still be open.

        Do it before another process gets the file: closing it would not end the registration then.
        """
        if self._callbacks.pop(file.fileno(), None) is not None:
            self._poll.unregister(file)

    def wait(self, seconds: float | None) -> None:
        """Wait for files that are ready, at most ``seconds``, and make their calls."""
        for number, _ in self._poll.poll(None if seconds is None else max(seconds, 0.0)):
            if (callback := self._callbacks.get(number)) is not None:
                callback()

    def close(self) -> None:
        self._poll.close()
