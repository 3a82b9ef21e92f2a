"""Timeline: what the scheduler did with one request, and when."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

#: Events kept of one request; further ones are only counted.
MAX_EVENTS = 256
#: What the head of the queue can wait for: a free slot, free pages, room in a step.
HeadWait: TypeAlias = Literal["slots", "pages", "budget"]
WAITS: Final[tuple[HeadWait, ...]] = ("slots", "pages", "budget")


class Event(NamedTuple):
    """``time`` is in seconds of the engine's clock. ``a`` and ``b`` depend on ``kind``:

    - queued: a requests were waiting already
    - shares: it waits for a prefix that another request is computing
    - loading: a pages of its prefix come from the host
    - admitted: into slot a, with b tokens cached
    - chunk: b prompt tokens are computed, from position a on
    - preempted: it lost its pages to an older request, at a tokens
    - finished: at a tokens
    - pinned: a pages stay in the cache for b milliseconds
    """

    time: float
    step: int
    kind: str
    a: int
    b: int


class WaitClock:
    """Seconds that the queue has waited in all, by reason (``WAITS``)."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(WAITS, 0.0)
        self.reason: HeadWait | None = None  # None when nothing waits
        self._now = 0.0

    def advance_clock(self, now: float) -> None:
        """Add the time since the last call to the present ``reason``."""
        if self.reason is not None:
            self.sums[self.reason] += now - self._now
        self._now = now


class Timeline:
    """Bounded, and written for rare events only: decode rows leave no trace here.

    Attributes:
        num_dropped: events beyond MAX_EVENTS.
    """

    __slots__ = ("_clock", "_queued_at", "_waited", "arrival", "events", "num_dropped")

    def __init__(self, arrival: float):
        self.arrival = arrival
        self.events: list[Event] = []
        self.num_dropped = 0
        self._waited: dict[str, float] = dict.fromkeys(WAITS, 0.0)
        self._clock: WaitClock | None = None  # while it waits
        self._queued_at: dict[str, float] = {}

    def note(self, time: float, step: int, kind: str, a: int = 0, b: int = 0) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(Event(time, step, kind, a, b))
        else:
            self.num_dropped += 1

    def wait_from(self, clock: WaitClock) -> None:
        """It begins to wait."""
        self._clock = clock
        self._queued_at = dict(clock.sums)

    def wait_until(self) -> None:
        """It stops waiting."""
        self._waited, self._clock = self.waited, None

    @property
    def pages_loaded(self) -> int:
        """Pages of its prefix that came from the host; asked before there are too many events."""
        return sum(event.a for event in self.events if event.kind == "loading")

    @property
    def waited(self) -> dict[str, float]:
        """Seconds in the queue so far, by what the queue's head was waiting for."""
        if self._clock is None:
            return dict(self._waited)
        since = self._queued_at
        return {
            reason: waited + self._clock.sums[reason] - since[reason]
            for reason, waited in self._waited.items()
        }
