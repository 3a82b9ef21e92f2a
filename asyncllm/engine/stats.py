"""What the engine counts about itself: plain numbers, cheap enough for every step.

The metrics route turns them into Prometheus families when it is scraped; nothing here locks or
allocates per token.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts of observations by bucket; ``bounds`` are inclusive upper limits, +Inf implied."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as text, observations at or below it), as Prometheus wants them."""
        pairs = []
        seen = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            seen += count
            pairs.append((str(bound), seen))
        return pairs


def _latency() -> Histogram:
    return Histogram(LATENCY_BUCKETS)


def _tokens() -> Histogram:
    return Histogram(TOKEN_BUCKETS)


@dataclass(slots=True)
class EngineStats:
    """Gauges are set after each step; counters only grow. Times are in seconds.

    ``pages_held`` are KV pages of live requests, ``pages_cached`` pages kept for prefix reuse only;
    with the free ones they add up to ``pages_total``. ``cached_tokens`` of the prompts were not
    computed. ``finished`` counts requests by finish reason, "deadline" and "error" included.
    ``cpu_*`` are the loop thread's own times, summed over steps.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    host_pages_used: int = 0

    steps: int = 0
    step_errors: int = 0
    preemptions: int = 0
    pages_evicted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "deadline", "error"), 0)
    )

    cpu_plan: float = 0.0
    cpu_apply: float = 0.0
    cpu_deliver: float = 0.0
    device_busy: float = 0.0

    time_to_first_token: Histogram = field(default_factory=_latency)
    inter_token_latency: Histogram = field(default_factory=_latency)
    queue_time: Histogram = field(default_factory=_latency)
    request_latency: Histogram = field(default_factory=_latency)
    step_tokens: Histogram = field(default_factory=_tokens)
