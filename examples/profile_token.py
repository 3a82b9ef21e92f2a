"""What one streamed token costs on the event loop: calls, turns of the loop, CPU time.

    python examples/profile_token.py [--rows 256] [--quick]

A device that computes nothing answers plans in the executor's thread, behind the real server; a
client in another process reads chat streams of plain text from a model that may reason.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import msgspec

from asyncllm import AsyncLLM
from asyncllm.config import EngineLimits
from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.engine import Engine
from asyncllm.engine.policy import Fair
from asyncllm.engine.scheduling.outcome import Applied
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.executor.thread_executor import ThreadExecutor
from asyncllm.server.app import create_app
from asyncllm.server.http.listener import Listener
from asyncllm.supervise.listening import bind
from asyncllm.system.event_loop import new_event_loop
from asyncllm.wire.channel import FLUSH, Channel
from asyncllm.wire.messages import NO_TOKEN, StepResult, decode_plan, pack, unpack

#: Of each answer; the built-in model has room for 2,048. Measuring ends earlier.
MAX_TOKENS = 1900
#: How long a step takes: the loop is idle when a result comes.
STEP_SECONDS = 0.005
BODY = (
    b'{"messages":[{"role":"user","content":"Count."}],"stream":true,"ignore_eos":true,'
    b'"max_tokens":%d}' % MAX_TOKENS
)


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts its turns."""

    turns = 0

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()  # type: ignore[misc]


class InstantWorker:
    """A device whose steps take ``STEP_SECONDS``, and give the same few tokens."""

    def __init__(self, limits: EngineLimits, tokens: list[int], posting: Callable[[], object]):
        self.limits = limits
        self._tokens = tokens
        self._posting = posting
        self._known: dict[int, int] = {}

    def run(self, channel: Channel) -> None:
        while (message := channel.receive()) is not None:
            if message == FLUSH:
                continue
            plan = decode_plan(message)
            launched = time.perf_counter()
            for admit in plan.admits:
                self._known[admit.slot] = len(unpack(admit.tokens))
            tokens = [self._sample(*row) for row in unpack(plan.rows, 3).tolist()]
            time.sleep(STEP_SECONDS)
            done = time.perf_counter()
            result = StepResult(plan.step, pack(tokens), (), None, launched, done, (), STEP_SECONDS)
            self._posting()
            channel.post(result)

    def _sample(self, slot: int, start: int, q_len: int) -> int:
        end = start + q_len
        return self._tokens[end % len(self._tokens)] if end >= self._known[slot] else NO_TOKEN


class CountingScheduler(Scheduler):
    """Notes in which turns of a ``CountingLoop`` a result is sent, and applied."""

    loop: asyncio.AbstractEventLoop | None = None
    sent_in = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns: list[int] = []
        self.warm = asyncio.Event()  # all rows have run for some steps

    def sent(self) -> None:
        self.sent_in = getattr(self.loop, "turns", 0)

    def apply(self, result: StepResult, now: float) -> Applied:
        self.turns.append(getattr(self.loop, "turns", 0) - self.sent_in + 1)
        if len(self.running) < self.limits.max_num_seqs:
            self.turns.clear()
        elif len(self.turns) > 20:
            self.warm.set()
        return super().apply(result, now)


@asynccontextmanager
async def serving(rows: int) -> AsyncIterator[tuple[AsyncLLM, CountingScheduler, str]]:
    """The real server around a model whose device is an ``InstantWorker``."""
    llm = AsyncLLM(device="sim", reasoning_parser="think", max_num_seqs=rows)
    await llm.start()
    assert llm._parts is not None
    await llm._parts.engine.aclose()
    limits = msgspec.structs.replace(llm.limits, max_decode_steps=1)
    words = llm.tokenizer.encode("Counting: one, two, three, four, five and so on.", False)
    scheduler = CountingScheduler.create(limits, Fair())
    scheduler.loop = asyncio.get_running_loop()
    executor = ThreadExecutor(lambda: InstantWorker(limits, words, scheduler.sent))
    await executor.start()
    engine = Engine(limits, executor, scheduler, llm.tokenizer.detokenizer)
    engine.start()
    llm._parts = msgspec.structs.replace(llm._parts, engine=engine, executor=executor)
    listener = Listener(create_app(llm, ServerConfig()), request_seconds=60, close_seconds=0.1)
    await listener.start(bind("127.0.0.1", 0))
    try:
        yield llm, scheduler, str(listener.address[1])
    finally:
        await listener.aclose()
        await llm.aclose()


@asynccontextmanager
async def streaming(rows: int) -> AsyncIterator[tuple[AsyncLLM, CountingScheduler]]:
    """``rows`` streams, all of which run, to a client in another process."""
    async with serving(rows) as (llm, scheduler, port):
        command = [sys.executable, __file__, "--read", port, "--rows", str(rows)]
        client = await asyncio.create_subprocess_exec(*command)
        try:
            await scheduler.warm.wait()
            yield llm, scheduler
        finally:
            client.kill()
            await client.wait()


async def read_streams(port: int, rows: int) -> None:
    """The client: reads as fast as it can, and looks at nothing."""

    async def read_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        )
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        while await reader.read(65536):
            pass

    await asyncio.gather(*(read_one() for _ in range(rows)))


async def count_calls(rows: int, seconds: float) -> tuple[float, float, Counter[str]]:
    """Python calls and C calls for each token, and the Python calls by file."""
    calls: Counter[str] = Counter()
    c_calls = 0

    def note(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal c_calls
        if event == "call":
            calls[frame.f_code.co_filename] += 1
        elif event == "c_call":
            c_calls += 1

    async with streaming(rows) as (llm, _):
        before = llm.stats.generation_tokens
        sys.setprofile(note)
        await asyncio.sleep(seconds)
        sys.setprofile(None)
        tokens = llm.stats.generation_tokens - before
    python = sum(calls.values())
    often = Counter({file: count for file, count in calls.items() if count >= tokens / 2})
    return python / tokens, c_calls / tokens, often


async def count_turns(seconds: float) -> float:
    """Turns of the loop from a result that is sent to the scheduler that takes it."""
    async with streaming(1) as (_, scheduler):
        scheduler.turns.clear()
        await asyncio.sleep(seconds)
        return sum(scheduler.turns) / len(scheduler.turns)


async def cpu_time(rows: int, seconds: float) -> float:
    """Microseconds of the loop's thread for each token."""
    async with streaming(rows) as (llm, _):
        clock = time.pthread_getcpuclockid(threading.get_ident())
        tokens, cpu = llm.stats.generation_tokens, time.clock_gettime(clock)
        await asyncio.sleep(seconds)
        cpu = time.clock_gettime(clock) - cpu
        return 1e6 * cpu / (llm.stats.generation_tokens - tokens)


def run(main: Any, loop_factory: Callable[[], asyncio.AbstractEventLoop] = new_event_loop) -> Any:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256, help="streams at once, in the second part")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure each")
    parser.add_argument("--files", action="store_true", help="print calls by file")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    parser.add_argument("--read", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        asyncio.run(read_streams(options.read, options.rows))
        return
    sys.setswitchinterval(1e-4)  # as the server has it
    rows, seconds = (8, 0.5) if options.quick else (options.rows, options.seconds)
    print(f"{'rows':>6}{'Python calls':>14}{'C calls':>9}{'files':>7}{'CPU us':>8}   per token")
    for count in dict.fromkeys((1, rows)):
        calls, c_calls, files = run(count_calls(count, seconds))
        micros = run(cpu_time(count, seconds))
        print(f"{count:>6}{calls:>14.1f}{c_calls:>9.1f}{len(files):>7}{micros:>8.1f}")
        if options.files:
            for file, number in files.most_common():
                print(f"{number:>10}  {file}")
    turns = run(count_turns(seconds), CountingLoop)
    print(f"turns of the loop from a result to its tokens: {turns:.2f}")


if __name__ == "__main__":
    main()
