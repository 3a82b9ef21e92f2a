"""Ranks on two machines, which are two processes here: the same answers, and losses that are named.

Over loopback, so machines that are cut off are those that are stopped.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]
import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.errors import EngineDead, ModelError
from asyncllm.executor.team import remote
from asyncllm.executor.team.station_messages import BEAT_SECONDS, Beat
from asyncllm.executor.team.status import LastOperation
from tests.support.server.polling import pages_are_released
from tests.support.team.ranks import peers
from tests.support.team.station import StationProcess, stations

FIELDS: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "dtype": "float32"}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
PROMPTS = ["1, 2, 3,", "The", "What is 23 + 45?"]
#: A few seconds, on a machine that is not busy.
SECONDS = 30


def expect_nothing_left(station: StationProcess, ranks: list[psutil.Process]) -> None:
    assert station.wait(SECONDS) in (0, -signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
    assert alive == []


async def test_greedy_tokens_are_those_of_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    async with AsyncLLM(**FIELDS) as llm:
        expected = [each.token_ids for each in await llm.generate(PROMPTS, GREEDY)]
    with stations() as (machines, [station]):
        async with AsyncLLM(machines=machines, tp=4, **FIELDS) as llm:
            ranks = station.ranks()
            assert (len(ranks), len(peers())) == (2, 1 + 2)
            together = await llm.generate(PROMPTS, GREEDY)
            assert [each.token_ids for each in together] == expected
            await pages_are_released(llm)
        assert station.wait(SECONDS) == 0
        expect_nothing_left(station, ranks)
        assert peers() == []
    assert "ERROR" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("lost", "sent", "how"),
    [
        ("rank 1", signal.SIGKILL, r"127.0.0.1: rank 1 \(process \d+\) was killed by SIGKILL"),
        ("rank 1", signal.SIGSTOP, r"127.0.0.1: rank 1 \(process \d+\) has been stopped for"),
        (
            "station",
            signal.SIGKILL,
            r"127.0.0.1: its station has ended; rank 1: its last operation",
        ),
        ("machine", signal.SIGSTOP, r"127.0.0.1 has not been heard of for 5 s; rank 1: its last"),
    ],
)
async def test_what_is_lost_is_named(lost: str, sent: signal.Signals, how: str) -> None:
    with stations() as (machines, [station]):
        async with AsyncLLM(machines=machines, tp=2, **FIELDS) as llm:
            streams = [asyncio.create_task(llm.generate(f"{i} and", LONG)) for i in range(4)]
            await asyncio.sleep(0.3)
            [rank] = station.ranks()
            signalled = {
                "rank 1": [rank],
                "station": [station.process],
                "machine": [station.process, rank],
            }
            for process in signalled[lost]:
                process.send_signal(sent)
            started = time.monotonic()
            errors = await asyncio.gather(*streams, return_exceptions=True)
            assert time.monotonic() - started < SECONDS
            for error in errors:
                assert isinstance(error, EngineDead)
                assert re.search(how, str(error))
                assert "its last operation was " in str(error)
        if lost == "machine":  # it comes back
            station.process.send_signal(signal.SIGCONT)
        expect_nothing_left(station, [rank])


def test_ranks_do_not_outlive_a_killed_rank_zero() -> None:
    with stations() as (machines, [station]):
        program = f"""
            import asyncio
            from asyncllm import AsyncLLM, SamplingParams
            from asyncllm.executor.team.station_messages import Machines
            async def main():
                machines = Machines(*{msgspec.structs.astuple(machines)!r})
                async with AsyncLLM(device="cpu", cpu_threads=1, tp=2, machines=machines) as llm:
                    print("ready", flush=True)
                    await llm.generate("hi", SamplingParams(max_tokens=1900, ignore_eos=True))
            asyncio.run(main())
        """
        command = [sys.executable, "-c", textwrap.dedent(program)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            ranks = station.ranks()
            assert len(ranks) == 1
            parent.kill()
        expect_nothing_left(station, ranks)


async def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "__version__", "0.0.1")
    with stations() as (machines, [station]):
        words = r"^machine 127.0.0.1: asyncllm is \S+ here, and 0.0.1 with rank 0$"
        with pytest.raises(ModelError, match=words):
            await AsyncLLM(machines=machines, tp=2, **FIELDS).start()
        assert station.wait(SECONDS) == 0


async def test_a_station_that_is_not_there() -> None:
    with stations() as (machines, [station]):
        station.process.kill()
        station.wait(SECONDS)
        with pytest.raises(ModelError, match=r"^machine 127.0.0.1, of rank 1: .*refused"):
            await AsyncLLM(machines=machines, tp=2, **FIELDS).start()


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
