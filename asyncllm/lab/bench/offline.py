"""The offline cases: all prompts at once, in this process, and the time until the last token."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import uuid4

from asyncllm.engine.requests.mailbox import Collector
from asyncllm.engine.stats import StepFigures
from asyncllm.errors import AsyncLLMError
from asyncllm.lab.bench.cases import OfflineCase, within
from asyncllm.lab.bench.report import OfflineRow, Report, describe
from asyncllm.system.terminal import case_progress
from asyncllm.types import SamplingParams, SchedulingParams, TokenDelta

if TYPE_CHECKING:
    from asyncllm.llm.async_llm import AsyncLLM

#: The first repetition warms up and never counts.
REPETITIONS: Final = 3
#: Before the first case: an idle engine on a GPU captures the CUDA graphs that starting left out.
SETTLE_SECONDS: Final = 4.0
#: How often progress is shown.
WATCH_SECONDS: Final = 0.5


class _Repetition(NamedTuple):
    seconds: float
    ttft: float
    lengths: list[int]
    engine: StepFigures


def report_of(llm: AsyncLLM, start_s: float) -> Report:
    """The report of a model in this process, without rows."""
    limits = llm.limits
    settings = {
        "policy": llm.config.policy,
        "dtype": limits.dtype,
        "KV cache tokens": limits.num_pages * limits.page_size,
        "most sequences": limits.max_num_seqs,
        "most tokens in a step": limits.max_num_batched_tokens,
    }
    if llm.config.speculative_config is not None:
        settings["speculative_config"] = llm.config.speculative_config
    machine = describe(limits.device)
    return Report(machine=machine, model=llm.model_name, settings=settings, start_s=start_s)


async def run_case(
    llm: AsyncLLM,
    case: OfflineCase,
    repetitions: int = REPETITIONS,
    clock: Callable[[], float] = time.perf_counter,
) -> OfflineRow | None:
    """Run a case several times; None if the model's context is too short for it.

    No prompt finds itself in the prefix cache, even if repetitions have the same prompts.
    """
    work = case.make(0)
    if work.longest > llm.limits.max_model_len:
        return None
    before = llm.stats.generation_tokens
    with case_progress(case.name, repetitions * sum(work.max_tokens), "tokens") as show:
        watching = asyncio.create_task(_watch(lambda: show(llm.stats.generation_tokens - before)))
        try:
            done = [await _run(llm, case, i, clock) for i in range(repetitions)]
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


async def _run(
    llm: AsyncLLM, case: OfflineCase, repetition: int, clock: Callable[[], float]
) -> _Repetition:
    work = case.make(repetition)
    prompts = [within(prompt, llm.limits.vocab_size) for prompt in work.prompts]
    params = [
        SamplingParams(temperature=case.temperature, max_tokens=count, ignore_eos=work.ignore_eos)
        for count in work.max_tokens
    ]
    scheduling = SchedulingParams(cache_salt=uuid4().hex)
    collectors = [_Timed(clock) for _ in prompts]
    ids: list[int] = []
    before = llm.stats.snapshot()
    started = clock()
    try:
        for prompt, own, collector in zip(prompts, params, collectors, strict=True):
            ids.append(llm.submit(prompt, own, collector, scheduling))
        outputs = [await collector.whole() for collector in collectors]
    finally:
        for request_id in ids:
            llm.abort(request_id)  # does nothing, unless an error left requests running
    seconds = clock() - started
    engine = llm.stats.since(before)
    lengths = [len(output.token_ids) for output in outputs]
    if work.ignore_eos and lengths != work.max_tokens:
        raise AsyncLLMError("the model did not generate as many tokens as it was asked for")
    traces = [trace for trace in map(llm.trace, ids) if trace is not None]
    ttfts = [t.first_token - t.arrived for t in traces if t.first_token is not None]
    if not traces:  # replicas (dp) keep theirs
        ttfts = [c.first_at - started for c in collectors if c.first_at is not None]
    return _Repetition(seconds, statistics.median(ttfts), lengths, engine)


class _Timed(Collector):
    """Notes when the first token was delivered."""

    def __init__(self, clock: Callable[[], float]):
        super().__init__()
        self.first_at: float | None = None
        self._clock = clock

    def emit(self, delta: TokenDelta) -> None:
        if self.first_at is None:
            self.first_at = self._clock()
        super().emit(delta)


async def _watch(show: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        show()
