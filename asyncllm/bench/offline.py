"""The offline cases: all prompts at once, in this process, and the time until the last token."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from asyncllm.bench.cases import OfflineCase, Work, within
from asyncllm.bench.progress import Progress
from asyncllm.bench.report import OfflineRow
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.errors import AsyncLLMError
from asyncllm.types import SamplingParams, SchedulingParams

if TYPE_CHECKING:
    from asyncllm.engine.stats import StepFigures
    from asyncllm.llm.async_llm import AsyncLLM

#: The first repetition meets many things for the first time and never counts.
REPETITIONS = 3
#: How often progress is looked at.
WATCH_SECONDS = 0.5


class _Repetition(NamedTuple):
    seconds: float
    ttft: float
    lengths: list[int]
    engine: StepFigures


async def run_case(
    llm: AsyncLLM, case: OfflineCase, repetitions: int = REPETITIONS
) -> OfflineRow | None:
    """Run a case several times; None when the model's context is too short for it.

    No prompt finds itself in the prefix cache, also where repetitions have the same prompts.
    """
    work = case.make(0)
    if work.longest > llm.limits.max_model_len:
        return None
    before = llm.stats.generation_tokens
    with Progress(case.name, repetitions * sum(work.max_tokens), "tokens") as progress:
        watching = asyncio.create_task(
            _watch(lambda: progress.show(llm.stats.generation_tokens - before))
        )
        try:
            done = [await _run(llm, case.make(i), case.temperature) for i in range(repetitions)]
        finally:
            watching.cancel()
    best = min(done[1:] or done, key=lambda repetition: repetition.seconds)
    out_tokens = sum(best.lengths)
    return OfflineRow(
        case=case.name,
        seconds=[repetition.seconds for repetition in done],
        in_tokens=sum(map(len, work.prompts)),
        out_tokens=out_tokens,
        tok_s=out_tokens / best.seconds,
        ms_per_token=1e3 * best.seconds / max(best.lengths),
        ttft_ms=1e3 * best.ttft,
        engine=best.engine,
    )


async def _run(llm: AsyncLLM, work: Work, temperature: float) -> _Repetition:
    prompts = [within(prompt, llm.limits.vocab_size) for prompt in work.prompts]
    params = [
        SamplingParams(temperature=temperature, max_tokens=wanted, ignore_eos=work.ignore_eos)
        for wanted in work.max_tokens
    ]
    scheduling = SchedulingParams(cache_salt=uuid4().hex)
    collectors = [Collector() for _ in prompts]
    ids: list[int] = []
    before = llm.stats.snapshot()
    started = time.perf_counter()
    try:
        for prompt, wanted, collector in zip(prompts, params, collectors, strict=True):
            ids.append(llm.submit(prompt, wanted, collector, scheduling))
        outputs = [await collector.whole() for collector in collectors]
    finally:
        for request_id in ids:
            llm.abort(request_id)  # only after an error is there something left
    seconds = time.perf_counter() - started
    engine = llm.stats.since(before)
    lengths = [len(output.token_ids) for output in outputs]
    if work.ignore_eos and lengths != work.max_tokens:
        raise AsyncLLMError("the model did not generate as many tokens as it was asked for")
    return _Repetition(seconds, statistics.median(_ttfts(llm, ids)), lengths, engine)


async def _watch(look: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        look()


def _ttfts(llm: AsyncLLM, ids: Iterable[int]) -> Iterator[float]:
    for request_id in ids:
        trace = llm.trace(request_id)
        if trace is not None and trace.first_token is not None:
            yield trace.first_token - trace.arrived
