"""What a station tells rank 0 of its ranks."""

from __future__ import annotations

import time

from asyncllm.executor.team.station_messages import BEAT_SECONDS, Beat
from asyncllm.executor.team.status import LastOperation


def test_what_a_rank_still_does_keeps_its_time() -> None:
    """Else the watchdog would take each beat for progress."""
    now = time.monotonic()
    hangs, goes_on = LastOperation("wait", 7, now - 3), LastOperation("launch", 8, now)
    first = Beat.of([hangs, goes_on]).last_operations([hangs, goes_on])
    later = Beat.of([hangs, LastOperation("launch", 9, now)]).last_operations(first)
    assert later[0] == first[0] == hangs
    assert later[1].step == 9
    again = Beat.of([hangs._replace(at=now + BEAT_SECONDS)]).last_operations([hangs])
    assert again[0].at > hangs.at
