"""A small event loop: callbacks by file descriptor, and things that wait for a time."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
T = TypeVar("T")


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


class Expiring(Generic[T]):
    def __init__(self, seconds: float):
        self._seconds = seconds
        self._deadlines: dict[T, float] = {}

    def __contains__(self, item: T) -> bool:
        return item in self._deadlines

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[T]:
        return iter(self._deadlines)

    def add(self, item: T) -> None:
        """It waits from now on; nothing changes if it waits already."""
        self._deadlines.setdefault(item, time.monotonic() + self._seconds)

    def discard(self, item: T) -> None:
        self._deadlines.pop(item, None)

    def clear(self) -> None:
        self._deadlines.clear()

    @property
    def deadline(self) -> float | None:
        """When ``due`` has something."""
        return next(iter(self._deadlines.values()), None)

    def due(self, most: int | None = None) -> list[T]:
        """Those that have waited long enough, up to ``most`` of them; they wait no more."""
        now, found = time.monotonic(), list[T]()
        for item, deadline in self._deadlines.items():
            if deadline > now or len(found) == most:
                break
            found.append(item)
        for item in found:
            del self._deadlines[item]
        return found
