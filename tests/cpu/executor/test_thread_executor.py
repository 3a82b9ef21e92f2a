"""The loop and the thread that launches: the loop stands back while the thread needs the GIL."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from asyncllm.executor.thread_executor import ThreadExecutor
from tests.support.server.serve_hanging import LIMITS


class Launching:
    """A worker that takes a while to launch; it says so only if ``tells``."""

    limits = LIMITS

    def __init__(self, *, tells: bool) -> None:
        self.num_launched = 0
        self._tells = tells
        self.goes_on = threading.Event()

    def run(self, channel: Any) -> None:
        while channel.receive() is not None:
            time.sleep(0.05)
            self.num_launched += 1
            if self._tells:
                channel.launched()
            self.goes_on.wait(10)  # the device runs


@pytest.mark.parametrize(("patience", "launched"), [(30.0, 1), (0.0, 0)])
async def test_submitting_waits_for_the_launch_if_told_to(patience: float, launched: int) -> None:
    worker = Launching(tells=True)
    executor = ThreadExecutor(lambda: worker, patience)
    await executor.start()
    executor.submit(b"plan", lambda outcome: None)
    assert worker.num_launched == launched
    worker.goes_on.set()
    await executor.close()


async def test_a_launch_that_takes_too_long_is_not_waited_for() -> None:
    worker = Launching(tells=False)
    executor = ThreadExecutor(lambda: worker, 0.001)
    await executor.start()
    executor.submit(b"plan", lambda outcome: None)
    assert worker.num_launched == 0
    worker.goes_on.set()
    await executor.close()
