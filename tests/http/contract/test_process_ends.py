"""The end of the process, and its state under load: a real one, with the demo model."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
import pytest

from tests.http.contract.conftest import PROMPTS, Running
from tests.support.server.serving import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

STREAMS = 100
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def options() -> Sequence[str]:
    return ("--max-num-seqs", "8", "--cpu-threads", "1", "--drain-seconds", "1")


async def test_health_is_answered_while_very_many_streams_arrive(server: Running) -> None:
    streams = [asyncio.ensure_future(server.ask(PROMPTS[0], **ENDLESS)) for _ in range(200)]
    seconds = []
    for _ in range(20):
        began = time.monotonic()
        status, body = await server.get("/health")
        seconds.append(time.monotonic() - began)
        assert (status, b"stalled" in body) == (200, False)
    assert statistics.median(seconds) < 0.5  # 10 ms if nothing else runs on the machine
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


async def test_a_signal_with_a_hundred_streams_open(server: Running) -> None:
    """Each gets its answer or an error; the process ends with 0. (It must be the last test.)"""
    streams = [asyncio.ensure_future(server.ask(PROMPTS[i % 8], **ENDLESS)) for i in range(STREAMS)]
    await server.until(http_requests_live=STREAMS)
    server.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        while (await server.get("/ready"))[0] != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        late = await server.ask(PROMPTS[0])
        ends = await asyncio.gather(*streams)
    assert (late.how, late.status, late.code) == ("error", 503, "not_ready")
    assert {(end.how, end.code) for end in ends} <= {("complete", None), ("error", "not_ready")}
    assert any(end.how == "error" for end in ends), "one second is too short for all of them"
    assert server.process.wait(20) == 0


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_a_kill_leaves_nothing_behind() -> None:
    before = shared_memory()
    server = ServerProcess("--device", "sim")
    parent = psutil.Process(server.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    assert len(processes) >= 2
    parent.kill()
    server.process.wait(5)
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []
    assert shared_memory() <= before
    server.stop()
