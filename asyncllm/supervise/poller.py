"""A small event loop: callbacks by file descriptor. asyncio would double the process's memory."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Protocol

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Poller:
    """Forked processes share it: they must do nothing but close it."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._heavy = select.epoll()
        self._poll.register(self._heavy, READ)
        # Where each file is registered, and what is called.
        self._files: dict[int, tuple[select.epoll, Callable[[], object]]] = {}

    def add(
        self,
        file: HasFileno,
        callback: Callable[[], object],
        events: int = READ,
        *,
        is_heavy: bool = False,
    ) -> None:
        """Call it whenever the file is ready, or broken. Adding a file again replaces that.

        Args:
            is_heavy: the call may take a millisecond or more. ``wait`` makes one such call at most.
        """
        number, poll = file.fileno(), self._heavy if is_heavy else self._poll
        before, _ = self._files.get(number, (None, None))
        if before is poll:
            poll.modify(number, events)
        else:
            if before is not None:
                before.unregister(number)
            poll.register(number, events)
        self._files[number] = poll, callback

    def remove(self, file: HasFileno) -> None:
        """Idempotent; the file must still be open.

        Do it before another process gets the file: closing it would not end the registration then.
        """
        poll, _ = self._files.pop(file.fileno(), (None, None))
        if poll is not None:
            poll.unregister(file)

    def wait(self, seconds: float | None) -> None:
        """Wait for files that are ready, at most ``seconds``, and make their calls."""
        for number, _ in self._poll.poll(None if seconds is None else max(seconds, 0.0)):
            if number == self._heavy.fileno():
                # Asked for one, Linux names another one each time.
                for one, _ in self._heavy.poll(0, 1):
                    self._call(one)
            else:
                self._call(number)

    def _call(self, number: int) -> None:
        _, callback = self._files.get(number, (None, None))
        if callback is not None:
            callback()

    def close(self) -> None:
        self._heavy.close()
        self._poll.close()
