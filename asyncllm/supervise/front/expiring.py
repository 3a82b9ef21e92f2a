"""Things that wait, each for the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


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
