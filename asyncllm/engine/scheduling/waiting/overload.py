"""Overload: which deadlines are given up when not all can be met."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import Sequence


def given_up(seqs: Iterable[Sequence], now: float, forecast: Forecast, pace: float) -> set[int]:
    """The ids of the fewest requests without which all others meet their deadline.

    Prompts are computed one after the other. Whenever one of them would be late, the longest up to
    there is given up: Moore, An n job, one machine sequencing algorithm for minimizing the number
    of late jobs (Management Science 15, 1968).

    Args:
        seqs: the earliest deadline first.
        pace: how many times longer than by itself each prompt takes, as others have their share.
    """
    chosen: list[tuple[float, int]] = []  # (-seconds, id)
    dropped: set[int] = set()
    for seq in seqs:
        seconds = pace * forecast.turn_seconds(seq)
        now += seconds
        heappush(chosen, (-seconds, seq.id))
        if now + forecast.output_seconds(seq) > seq.deadline:
            longest, id = heappop(chosen)
            now += longest
            dropped.add(id)
    return dropped
