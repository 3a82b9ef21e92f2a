"""A rank that is lost: everybody is told within seconds which and why, and nothing is left."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import get_args

import psutil  # type: ignore[import-untyped]
import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.errors import EngineDead, ModelError
from asyncllm.executor.runner import ModelRunner
from asyncllm.executor.team import team
from asyncllm.parallel import group
from asyncllm.wire.heartbeat import OperationName
from tests.cpu.llm.test_library import until
from tests.support.team.ranks import peers, plant

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.mark.parametrize(
    ("sent", "busy", "how"),
    [
        (signal.SIGKILL, False, "was killed by SIGKILL"),
        (signal.SIGSTOP, True, "has been stopped for 0.5 s"),
    ],
)
async def test_a_lost_rank_is_named(sent: signal.Signals, busy: bool, how: str) -> None:
    async with AsyncLLM(device="cpu", cpu_threads=1, dtype="float32", tp=2) as llm:
        streams = []
        if busy:
            streams = [asyncio.create_task(llm.generate(f"{i} and", LONG)) for i in range(4)]
            await asyncio.sleep(0.3)
        [lost] = peers()
        if busy:  # the watchdog sees what it does
            assert llm.vitals is not None
            [peer] = llm.vitals.heartbeat.peers
            assert (peer.rank, peer.operation().name in get_args(OperationName)) == (1, True)
        lost.send_signal(sent)
        started = time.monotonic()
        if not busy:
            await until(lambda: not llm.healthy)
            streams = [asyncio.create_task(llm.generate("late", LONG))]
        errors = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - started < 20.0  # a second, on a machine that is not busy
        for error in errors:
            assert isinstance(error, EngineDead)
            assert f"rank 1 (process {lost.pid}) {how}; its last operation was" in str(error)
    assert peers() == []


async def test_a_step_that_fails_on_rank_zero_alone_ends_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with AsyncLLM(device="cpu", cpu_threads=1, tp=2) as llm:

        def fail(*_: object) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(ModelRunner, "launch", fail)
        with pytest.raises(EngineDead, match="failed on rank 0 alone"):
            await asyncio.wait_for(llm.generate("hi", LONG), 15.0)  # 5 s, when it is not busy
    assert peers() == []


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
async def test_a_rank_that_is_lost_while_ranks_join(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(
        f"""
        import os, signal, time, asyncllm.parallel.group as group
        def join(*args, **options):
            os.kill(os.getpid(), signal.{how})
            time.sleep(1000)
        group.join = join
        """,
        tmp_path,
        monkeypatch,
    )
    monkeypatch.setattr(group, "_JOIN", timedelta(seconds=3))
    ended = r"rank 1 \(process \d+\) (was killed by SIGKILL|has been stopped for 0.5 s); "
    last = r"its last operation was joining the other ranks, \d"  # of no step
    with pytest.raises(ModelError, match=ended + last):
        await AsyncLLM(device="cpu", tp=2).start()
    assert peers() == []


def test_ranks_do_not_outlive_a_killed_parent() -> None:
    program = """
        import asyncio
        from asyncllm import AsyncLLM, SamplingParams
        async def main():
            async with AsyncLLM(device="cpu", cpu_threads=1, tp=2) as llm:
                print("ready", flush=True)
                await llm.generate("hi", SamplingParams(max_tokens=1900, ignore_eos=True))
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        ranks = peers(parent.pid)
        parent.kill()
    assert len(ranks) == 1
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert alive == []


async def test_what_cannot_be_divided_starts_nothing(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "Team", None)
    with pytest.raises(ModelError, match="tp 3 does not divide num_attention_heads 4"):
        await AsyncLLM(folder_of("llama"), device="cpu", tp=3).start()
    assert peers() == []


async def test_a_rank_that_cannot_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(
        """
        import asyncllm.models.spec
        def refuse(*args):
            raise asyncllm.errors.ModelError("planted", param="dtype")
        asyncllm.models.spec.read_spec = refuse
        """,
        tmp_path,
        monkeypatch,
    )
    with pytest.raises(ModelError, match=r"^rank 1: planted"):
        await AsyncLLM(device="cpu", tp=2).start()
    assert peers() == []
