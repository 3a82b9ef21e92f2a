"""A small event loop: callbacks by file descriptor. asyncio would double the process's memory."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

READ, WRITE = select.POLLIN, select.POLLOUT


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Poller:
    """``poll`` and not ``epoll``: an epoll object would be shared with forked processes."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], object]] = {}

    def add(self, file: HasFileno, callback: Callable[[], object], events: int = READ) -> None:
        """Call it whenever the file is ready, or broken. Adding a file again replaces that."""
        self._poll.register(file, events)
        self._callbacks[file.fileno()] = callback

    def remove(self, file: HasFileno) -> None:
        """Idempotent; the file must still be open."""
        if self._callbacks.pop(file.fileno(), None) is not None:
            self._poll.unregister(file)

    def wait(self, seconds: float | None) -> None:
        """Wait for files that are ready, at most ``seconds``, and make their calls."""
        for number, _ in self._poll.poll(None if seconds is None else max(seconds, 0.0) * 1000):
            if (callback := self._callbacks.get(number)) is not None:
                callback()
