"""A rank that is lost: everybody is told within seconds which and why, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.errors import EngineDead, ModelError
from asyncllm.executor.team import leader
from tests.cpu.llm.test_library import until
from tests.support.team.ranks import peers

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.mark.parametrize(
    ("sent", "how", "busy"),
    [
        (signal.SIGKILL, "was killed by SIGKILL", False),
        (signal.SIGSTOP, "has been stopped for 0.5 s", True),
    ],
)
async def test_a_lost_rank_is_named(sent: signal.Signals, how: str, busy: bool) -> None:
    async with AsyncLLM(device="cpu", cpu_threads=1, tp=2, dtype="float32") as llm:
        streams = []
        if busy:
            streams = [asyncio.create_task(llm.generate(f"{i} and", LONG)) for i in range(4)]
            await asyncio.sleep(0.3)
        [peer] = peers()
        peer.send_signal(sent)
        started = time.monotonic()
        if not busy:
            await until(lambda: not llm.healthy)
            streams = [asyncio.create_task(llm.generate("late", LONG))]
        errors = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - started < 20.0  # a second, on a machine that is not busy
        for error in errors:
            assert isinstance(error, EngineDead)
            assert f"rank 1 (process {peer.pid}) {how}; its last operation was" in str(error)
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
    monkeypatch.setattr(leader, "Team", None)
    with pytest.raises(ModelError, match="tp 3 does not divide num_attention_heads 4"):
        await AsyncLLM(folder_of("llama"), device="cpu", tp=3).start()
    assert peers() == []


async def test_a_rank_that_cannot_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import sys
            if "asyncllm.executor.team.peer" in sys.orig_argv:
                import asyncllm.models.spec
                def refuse(folder):
                    raise asyncllm.errors.ModelError("planted")
                asyncllm.models.spec.read_spec = refuse
        """)
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ModelError, match="rank 1: planted"):
        await AsyncLLM(device="cpu", tp=2).start()
    assert peers() == []
