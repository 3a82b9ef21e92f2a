"""Programs that end without closing their model: silently, soon, and with their own exit code."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import msgspec
import pytest

from asyncllm.executor import thread_executor as executor_module
from asyncllm.executor.thread_executor import ThreadExecutor
from asyncllm.wire.messages import StepPlan
from tests.support.server.serve_hanging import LIMITS, HangingWorker

START = """
import asyncio, atexit, sys, time
# The first handler to be registered is the last one to run.
atexit.register(lambda: print("exit took", time.monotonic() - ended))
from asyncllm import LLM, AsyncLLM, SamplingParams
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3)
OPTIONS = dict(device="cpu", cpu_threads=1, kv_cache_tokens=4096)
"""

PROGRAMS = {
    "in a function": """
        def main():
            llm = LLM(**OPTIONS)
            llm.generate("hi", SHORT)
        main()
        ended = time.monotonic()
    """,
    "in a module": """
        llm = LLM(**OPTIONS)
        llm.generate(["hi", "ho"], SHORT, progress=False)
        ended = time.monotonic()
    """,
    "within a stream": """
        llm = LLM(**OPTIONS)
        stream = llm.stream("hi", LONG)
        next(stream)
        ended = time.monotonic()
        sys.exit(3)
    """,
    "dropped with its loop": """
        async def main():
            llm = await AsyncLLM(**OPTIONS).start()
            task = asyncio.create_task(llm.generate("hi", LONG))
            await asyncio.sleep(0.3)
        asyncio.run(main())
        ended = time.monotonic()
    """,
    "on a loop that is never closed": """
        loop = asyncio.new_event_loop()
        llm = AsyncLLM(**OPTIONS)
        loop.run_until_complete(llm.start())
        task = loop.create_task(llm.generate("hi", LONG))
        loop.run_until_complete(asyncio.sleep(0.3))
        ended = time.monotonic()
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_printed(name: str) -> None:
    program = START + textwrap.dedent(PROGRAMS[name])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    assert done.returncode == (3 if name == "within a stream" else 0)
    [line] = done.stdout.splitlines()
    assert float(line.removeprefix("exit took ")) < 4.0


async def hanging_executor() -> ThreadExecutor:
    executor = ThreadExecutor(HangingWorker)
    await executor.start()
    plan = StepPlan(step=0, rows=b"", new_pages=b"", admits=())
    executor.submit(msgspec.msgpack.encode(plan), lambda outcome: None)
    return executor


async def test_closing_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    class SlowWorker:
        limits = LIMITS

        def run(self, channel: Any) -> None:
            released.wait()

    monkeypatch.setattr(executor_module, "CLOSE_SECONDS", 0.2)
    before = set(threading.enumerate())
    executor = ThreadExecutor(SlowWorker)
    assert await executor.start() == LIMITS
    [thread] = set(threading.enumerate()) - before
    executor.submit(b"plan", lambda outcome: None)
    started = time.monotonic()
    await executor.close()
    assert time.monotonic() - started < 5.0
    assert "its thread is left behind" in caplog.text
    await executor.close()
    released.set()
    thread.join()


async def test_a_closed_executor_has_no_thread() -> None:
    class IdleWorker:
        limits = LIMITS

        def run(self, channel: Any) -> None:
            while channel.receive() is not None:
                pass

    before = set(threading.enumerate())
    executor = ThreadExecutor(IdleWorker)
    await executor.start()
    [thread] = set(threading.enumerate()) - before
    assert thread.name == "asyncllm-executor"
    await asyncio.gather(executor.close(), executor.close())
    assert not thread.is_alive()


def test_a_step_that_hangs_does_not_keep_a_program() -> None:
    program = """
        import asyncio, time
        from asyncllm.executor import thread_executor as module
        from tests.cpu.llm.test_exit import hanging_executor
        module.EXIT_SECONDS = 0.5
        asyncio.run(hanging_executor())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
