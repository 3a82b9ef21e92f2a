"""The online cases: dealt out to processes that make the load, and what they saw put together."""

from __future__ import annotations

import multiprocessing
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from ctypes import c_ulong
from itertools import pairwise
from multiprocessing.connection import wait
from multiprocessing.sharedctypes import RawValue
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

from asyncllm.bench.cases import OnlineCase, warm_up
from asyncllm.bench.load import Answered, Job, Outcome, Target, process_main
from asyncllm.bench.progress import Progress
from asyncllm.bench.report import OnlineRow
from asyncllm.bench.scrape import Watch
from asyncllm.errors import AsyncLLMError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe
    from multiprocessing.process import BaseProcess

#: Streams for one process. It could read ten times as many in time, but those that come in one step
#: of the server are looked at one after the other, and its clock says when.
STREAMS = 64
#: Every process is told when to begin so many seconds before.
HEAD_START = 0.05
#: How often progress is looked at.
WATCH_SECONDS = 0.5


class _Process(NamedTuple):
    """One that makes load, and what it shares with us (see ``process_main``)."""

    process: BaseProcess
    pipe: Pipe
    num_done: c_ulong


class Load:
    """Processes that make load; each is started when it is first needed.

    ::

        with Load(target) as load:
            row = load.run(case)
    """

    def __init__(self, target: Target, most_processes: int | None = None):
        """``most_processes``: a quarter of the machine's cores by default, the server's own."""
        self.target = target
        self._most = most_processes or max(1, (os.cpu_count() or 1) // 4)
        self._processes: list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for one in self._processes:
            one.pipe.close()
            one.process.terminate()
            one.process.join()

    def run(self, case: OnlineCase) -> OnlineRow:
        """Make the load of one case.

        Raises:
            AsyncLLMError: no request was answered; the message has the first failure.
        """
        processes = self._started(min(self._most, -(-case.most_at_once // STREAMS)))
        for one, job in zip(processes, deal(case, self.target, len(processes)), strict=True):
            one.pipe.send_bytes(msgspec.msgpack.encode(job))
        _receive(processes)
        watch = Watch(self.target.url, self.target.api_key)
        start = time.perf_counter() + HEAD_START
        for one in processes:
            one.pipe.send_bytes(msgspec.msgpack.encode(start))
        with Progress(case.name, len(case.shots), "requests") as progress:
            received = _receive(processes, progress)
        outcomes = [msgspec.msgpack.decode(data, type=Outcome) for data in received]
        row = summarize(case, outcomes, start)
        row.engine = watch.look(row.seconds)
        return row

    def _started(self, count: int) -> list[_Process]:
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < count:
            ours, theirs = context.Pipe()
            num_done = RawValue(c_ulong)
            process = context.Process(target=process_main, args=(theirs, num_done), daemon=True)
            process.start()
            theirs.close()  # so that its end shows here
            self._processes.append(_Process(process, ours, num_done))
        return self._processes[:count]


def run_cases(target: Target, cases: Sequence[OnlineCase], seed: int = 0) -> Iterator[OnlineRow]:
    """Warm the server up, and then run one case after the other."""
    with Load(target) as load:
        load.run(warm_up(cases, seed))
        for case in cases:
            yield load.run(case)


def deal(case: OnlineCase, target: Target, count: int) -> list[Job]:
    """The case in ``count`` parts, as equal as they can be."""
    return [
        Job(
            target,
            len(range(part, case.clients, count)),
            list(case.shots[part::count]),
        )
        for part in range(count)
    ]


def summarize(case: OnlineCase, outcomes: Sequence[Outcome], start: float) -> OnlineRow:
    """What the clients saw, from ``start`` (``time.perf_counter``) on.

    Raises:
        AsyncLLMError: no request was answered.
    """
    answered = [answer for outcome in outcomes for answer in outcome.answered]
    good = [answer for answer in answered if answer.failure is None]
    if not good:
        raise AsyncLLMError(f"{case.name}: no request was answered; {answered[0].failure}")
    times = [array("d", answer.times) for answer in good]
    seconds = max(came[-1] for came in times) - start
    ttft, tpot, gaps, long_ttft = [], [], [], []
    for answer, came in zip(good, times, strict=True):
        first = came[0] - answer.sent
        if answer.long:
            long_ttft.append(first)
            continue
        ttft.append(first)
        tpot.append((came[-1] - came[0]) / max(1, answer.tokens - 1))
        gaps += [after - before for before, after in pairwise(came)]
    return OnlineRow(
        case=case.name,
        requests=len(answered),
        failed=len(answered) - len(good),
        seconds=seconds,
        tok_s=sum(map(_counted, good)) / seconds,
        ttft_p50=percentile_ms(ttft, 0.5),
        ttft_p99=percentile_ms(ttft, 0.99),
        tpot_p50=percentile_ms(tpot, 0.5),
        itl_p50=percentile_ms(gaps, 0.5),
        itl_p99=percentile_ms(gaps, 0.99),
        itl_max=percentile_ms(gaps, 1.0),
        tokens_per_event=sum(answer.tokens for answer in good) / sum(map(len, times)),
        long_ttft_p50=percentile_ms(long_ttft, 0.5),
        long_ttft_p99=percentile_ms(long_ttft, 0.99),
        clients=case.clients or None,
        rate=case.rate,
        client_busy=max(outcome.cpu_share for outcome in outcomes),
    )


def percentile_ms(values: list[float], q: float) -> float | None:
    """In milliseconds; None of nothing."""
    if not values:
        return None
    values = sorted(values)
    return 1e3 * values[min(len(values) - 1, int(q * len(values)))]


def _counted(answer: Answered) -> int:
    """Its tokens, if it is not there for the others' sake."""
    return 0 if answer.long else answer.tokens


def _receive(processes: Sequence[_Process], progress: Progress | None = None) -> list[bytes]:
    """What each process says next."""
    silent = {one.pipe for one in processes}
    while progress is not None and silent:
        silent -= set(wait(silent, WATCH_SECONDS))
        progress.show(sum(one.num_done.value for one in processes))
    try:
        return [one.pipe.recv_bytes() for one in processes]
    except EOFError:
        raise AsyncLLMError("a process that makes the load has ended") from None
