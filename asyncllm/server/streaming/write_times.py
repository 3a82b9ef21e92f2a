"""When streams' tokens were written to their sockets, as their clients see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from aiohttp import web

from asyncllm.engine.stats import LATENCY_BUCKETS, Histogram


class Stream(Protocol):
    """One stream; times by ``time.perf_counter``.

    Attributes:
        arrived: when its request did.
        written_at: when tokens were last written; 0 before.
    """

    arrived: float
    written_at: float


class WriteTimes:
    """Histograms of the time to the first token, and between writes of tokens, of all streams.

    uvloop writes to the sockets at the end of each turn, so a turn's streams are looked at together
    in the next turn, after their writes.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.first = Histogram(LATENCY_BUCKETS)
        self.between = Histogram(LATENCY_BUCKETS)
        #: Streams written to in this turn. They add themselves; the first has ``observe`` called in
        #: the next turn.
        self.written: list[Stream] = []
        self._clock = clock

    def observe(self) -> None:
        """What was written in the last turn has reached the sockets."""
        now = self._clock()
        written, self.written = self.written, []
        since: dict[float, int] = {}  # streams by the time of their previous write
        for stream in written:
            last = stream.written_at
            stream.written_at = now
            if last:
                since[last] = since.get(last, 0) + 1
            else:
                self.first.observe(now - stream.arrived)
        for last, count in since.items():
            self.between.observe(now - last, count)


WRITE_TIMES: Final = web.AppKey("asyncllm_write_times", WriteTimes)
