"""The start-up bill: seconds and device memory of each phase of loading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

#: Of times in /proc, on all of Linux's architectures.
TICKS_PER_SECOND = 100


class StartupItem(msgspec.Struct, frozen=True):
    """One phase; ``bytes`` is the growth of used device memory."""

    name: str
    seconds: float
    bytes: int

    @property
    def figures(self) -> str:
        return f"{self.seconds:8.2f} s {self.bytes / 2**30:8.2f} GiB"


class StartupBill:
    """Written by the loading thread; read it once loading is done. ``items`` are in order."""

    def __init__(self) -> None:
        self.items: list[StartupItem] = []

    @contextmanager
    def phase(self, name: str, free_bytes: Callable[[], int] | None = None) -> Iterator[None]:
        """Measure a phase; ``free_bytes`` is the device's free memory. Errors record nothing."""
        free = free_bytes() if free_bytes else 0
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        taken = free - free_bytes() if free_bytes else 0
        self.items.append(StartupItem(name, seconds, max(taken, 0)))

    @property
    def seconds(self) -> float:
        """The sum over all phases."""
        return sum(item.seconds for item in self.items)

    @property
    def bytes(self) -> int:
        """The sum over all phases."""
        return sum(item.bytes for item in self.items)

    def __str__(self) -> str:
        """A line for each phase that took something, and one for the sum: name, seconds, GiB."""
        total = StartupItem("in all", self.seconds, self.bytes)
        shown = [item for item in self.items if item.figures != StartupItem("", 0, 0).figures]
        width = max(len(item.name) for item in (*shown, total))
        return "\n".join(f"{item.name:<{width}} {item.figures}" for item in (*shown, total))


class ProcessBill:
    """The bill of a server, from the start of its process until now.

    Make it when loading begins.

    Args:
        pid: of another process, whose start counts.
        since: by ``time.monotonic``; this moment counts, and not the start of a process.
    """

    def __init__(self, pid: int | None = None, since: float | None = None) -> None:
        self._pid = pid
        self._since = since
        self._before = self._age()

    def whole(self, bill: StartupBill) -> StartupBill:
        """The bill of loading, with "server" before it and "rest" for what is in no phase.

        Where there is no /proc, that of loading alone.
        """
        age, whole = self._age(), StartupBill()
        if age is None or self._before is None:
            return bill
        rest = max(age - self._before - bill.seconds, 0.0)
        first, last = StartupItem("server", self._before, 0), StartupItem("rest", rest, 0)
        whole.items = [first, *bill.items, last]
        return whole

    def _age(self) -> float | None:
        if self._since is not None:
            return time.monotonic() - self._since
        return process_seconds(self._pid)


def process_seconds(pid: int | None = None) -> float | None:
    """The age of a process, by default of this one; None where there is no /proc."""
    try:
        with (
            open(f"/proc/{pid or 'self'}/stat", encoding="utf-8") as stat,
            open("/proc/uptime") as uptime,
        ):
            # The second field, a name in parentheses, may contain anything; the 22nd is the start.
            after_name = stat.read().rpartition(")")[2].split()
            started = int(after_name[19]) / TICKS_PER_SECOND
            return float(uptime.read().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return None
