"""Part 4 of ``bench_scheduler.py``: what stops the event loop longest, in CPU time."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from asyncllm import AsyncLLM, SamplingParams, SchedulingParams
from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.engine.policy import POLICIES
from asyncllm.engine.recording.record import digest_of
from asyncllm.engine.requests.check import check_request
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.step import Planned
from asyncllm.engine.token_constraints import prepare
from asyncllm.server.garbage import collect_when_quiet
from asyncllm.wire.messages import StepResult, encode, pack

LONG_PROMPT = 40_000
SHARED = 8_000
PAGE_SIZE = 16
OUTPUT = 2
STREAMS = 256
TOKEN = 11


class Driven:
    """A scheduler with one step in flight; keeps the longest time of each kind of call."""

    def __init__(self, limits: EngineLimits):
        self.limits = limits
        self.longest: dict[str, float] = {}
        self.scheduler = Scheduler.create(limits, POLICIES["fair"]())
        self._step = self._made = 0

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = call()
        took = time.thread_time() - began
        self.longest[name] = max(took, self.longest.get(name, 0.0))
        return result

    def add(self, prompt: list[int]) -> None:
        """What ``Engine.add`` does, but for the output's text."""
        self._made += 1
        params = prepare(SamplingParams(max_tokens=OUTPUT, ignore_eos=True), (), self.limits)
        tokens, max_length = check_request(prompt, params, self.limits)
        seq = Sequence(
            self._made,
            tokens,
            params,
            SchedulingParams(),
            max_length=max_length,
            eos_ids=(),
            seed=0,
            arrival=0.0,
        )
        self.scheduler.add(seq, 0.0)

    def run(self, kind: str) -> None:
        """All steps that there are."""
        while (planned := self.timed(f"{kind}: plan", self._plan)) is not None:
            self.timed(f"{kind}: encode the plan", partial(encode, planned.message))
            self.timed(f"{kind}: digest of a recorded plan", partial(digest_of, planned.message))
            tokens = pack([TOKEN] * (len(planned.message.rows) // 12))
            result = StepResult(planned.message.step, tokens, (), None, 0.0, 0.0, (), 0.01)
            self.timed(f"{kind}: apply a result", partial(self.scheduler.apply, result, 0.0))

    def _plan(self) -> Planned | None:
        planned = self.scheduler.plan(self._step, 0.0)
        self._step += planned is not None
        return planned


def scheduler_pauses(limits: EngineLimits) -> dict[str, float]:
    """Seconds of the longest calls, with no limit to a step but its tokens."""
    num_pages = LONG_PROMPT // PAGE_SIZE + STREAMS
    long = msgspec.structs.replace(
        limits, num_pages=num_pages, max_num_batched_tokens=65_536, prefill_chunk=65_536
    )
    driven = Driven(long)
    for first, kind in ((1, "new"), (1, "cached"), (2, "evicts as many")):
        name = f"{LONG_PROMPT:,} tokens, {kind}"
        prompt = [first, *range(2, LONG_PROMPT + 1)]
        driven.timed(f"{name}: add", partial(driven.add, prompt))
        driven.run(name)
    crowd = Driven(msgspec.structs.replace(long, num_pages=100 * STREAMS))
    for length in (40, 400):
        name = f"{STREAMS} prompts of {length} at once"
        for index in range(STREAMS):
            prompt = [1000 * length + index, *range(1, length)]
            crowd.timed(f"{name}: add one", partial(crowd.add, prompt))
        crowd.run(name)
    name = f"{STREAMS} prompts that share {SHARED:,} tokens"
    for index in range(STREAMS):
        prompt = [*range(1, SHARED + 1), 1000 + index]
        crowd.timed(f"{name}: add one", partial(crowd.add, prompt))
    crowd.run(name)
    return driven.longest | crowd.longest


async def collector_pauses(num_waiting: int, *, as_server: bool) -> list[float]:
    """Seconds of each of Python's collections while requests come and then wait."""
    config = EngineConfig(
        device="sim",
        sim_profile="h200-8b",
        max_num_seqs=STREAMS,
        max_waiting=2 * num_waiting + STREAMS,
        max_waiting_tokens=10**9,
    )
    pauses: list[float] = []
    began = 0.0

    def watch(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
        else:
            pauses.append(time.thread_time() - began)

    async with AsyncLLM(config=config) as llm:
        tasks: list[asyncio.Task[Any]] = []
        if as_server:
            tasks.append(asyncio.create_task(collect_when_quiet(lambda: num_waiting)))
            await asyncio.sleep(0)
        gc.callbacks.append(watch)
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        for index in range(STREAMS + num_waiting):
            prompt = [index % 1000, *range(1, 100)]
            tasks.append(asyncio.create_task(llm.generate(prompt, params)))
        await asyncio.sleep(5.0)
        gc.callbacks.remove(watch)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
    return pauses


def bench_pauses(limits: EngineLimits, rounds: int, num_waiting: int) -> None:
    print("\nthe longest pauses of the loop: milliseconds of CPU time")
    all_rounds = [scheduler_pauses(limits) for _ in range(rounds)]
    for name in all_rounds[0]:
        print(f"{name:>56}{1e3 * min(found[name] for found in all_rounds):>9.2f}")
    gc.enable()
    title = f"garbage collection, {STREAMS} streams and {num_waiting:,} waiting: "
    for who, as_server in (("library", False), ("server", True)):
        pauses = asyncio.run(collector_pauses(num_waiting, as_server=as_server))
        print(f"{title + who:>70}{1e3 * max(pauses):>9.2f}")
