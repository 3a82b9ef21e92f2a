"""When a server that has died is started again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: A server that was ready for this long starts without a delay when it dies.
STEADY_SECONDS: Final = 60.0
#: The delay doubles with each death up to this.
LONGEST_DELAY: Final = 30.0
#: After this many doublings it is above that.
MOST_DOUBLINGS: Final = 5
#: So many starts in a row that do not become ready are enough.
FAILED_STARTS: Final = 5


class Restarts:
    """Counts deaths. The first restart is immediate, the next ones after 1, 2, 4... seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.count = 0
        self._clock = clock
        self._ready_at: float | None = None
        self._was_ready = False
        self._deaths = 0  # since it was last steady
        self._failed = 0  # starts in a row

    def ready(self) -> None:
        """The server serves."""
        self._ready_at = self._clock()
        self._was_ready = True

    def delay(self, *, again: bool = False) -> float | None:
        """The server has died: seconds to wait before the next start, or None to give up.

        Args:
            again: start it again although it has never been ready: others serve with the same
                options, or it did not fail by itself. Else it would fail in the same way.
        """
        if not (self._was_ready or again):
            return None
        if self._ready_at is None:
            self._failed += 1
        else:
            self._failed = 0
            if self._clock() - self._ready_at >= STEADY_SECONDS:
                self._deaths = 0
        if self._failed >= FAILED_STARTS:
            return None
        self._ready_at = None
        self._deaths += 1
        self.count += 1
        if self._deaths == 1:
            return 0.0
        # A power of the number of deaths would not fit a float after a thousand of them.
        return min(2.0 ** min(self._deaths - 2, MOST_DOUBLINGS), LONGEST_DELAY)
