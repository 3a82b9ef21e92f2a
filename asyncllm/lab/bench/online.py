"""The online cases: requests dealt out to load processes, and their measurements combined."""

from __future__ import annotations

import multiprocessing
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_ulong
from itertools import pairwise
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from typing import Final, NamedTuple, Self

import msgspec

from asyncllm.errors import AsyncLLMError
from asyncllm.lab.bench.cases import OnlineCase, warm_up
from asyncllm.lab.bench.load import Job, Outcome, Target, process_main
from asyncllm.lab.bench.report import OnlineRow
from asyncllm.lab.bench.server import figures, scrape
from asyncllm.system.terminal import case_progress

#: Streams per process. It could read ten times as many, but the events of one server step are read
#: one after the other, which delays their times.
STREAMS: Final = 64
#: The processes are told the start time this many seconds before.
HEAD_START: Final = 0.05
#: How often progress is shown.
WATCH_SECONDS: Final = 0.5


class _Process(NamedTuple):
    """A load process, and the arguments of its ``process_main``."""

    process: BaseProcess
    pipe: Pipe
    num_done: c_ulong


class Load:
    """A context with processes that make load; each is started when it is first needed."""

    def __init__(self, target: Target, most_processes: int | None = None):
        """``most_processes``: by default a quarter of the cores, as the server needs some."""
        self.target = target
        self._most = most_processes or max(1, (os.cpu_count() or 1) // 4)
        self._processes: list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._processes:
            one.pipe.close()
            one.process.terminate()
            one.process.join()

    def run(self, case: OnlineCase) -> OnlineRow:
        """Run one case.

        Raises:
            AsyncLLMError: no request was answered; the message has the first failure.
        """
        processes = self._started(min(self._most, -(-case.most_at_once // STREAMS)))
        for one, job in zip(processes, deal(case, self.target, len(processes)), strict=True):
            one.pipe.send_bytes(msgspec.msgpack.encode(job))
        _receive(processes)
        before = scrape(self.target.url, self.target.api_key)
        start = time.perf_counter() + HEAD_START
        for one in processes:
            one.pipe.send_bytes(msgspec.msgpack.encode(start))
        with case_progress(case.name, len(case.shots), "requests") as show:
            received = _receive(processes, show)
        outcomes = [msgspec.msgpack.decode(data, type=Outcome) for data in received]
        row = summarize(case, outcomes, start)
        after = scrape(self.target.url, self.target.api_key)
        row.engine = figures(before, after, row.seconds) if before and after else None
        return row

    def _started(self, count: int) -> list[_Process]:
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < count:
            ours, theirs = context.Pipe()
            num_done = RawValue(c_ulong)
            process = context.Process(target=process_main, args=(theirs, num_done), daemon=True)
            process.start()
            theirs.close()  # so that recv raises EOFError when the process ends
            self._processes.append(_Process(process, ours, num_done))
        return self._processes[:count]


def run_cases(target: Target, cases: Sequence[OnlineCase], seed: int = 0) -> Iterator[OnlineRow]:
    """Warm the server up, then run the cases one after the other."""
    with Load(target) as load:
        load.run(warm_up(cases, seed))
        for case in cases:
            yield load.run(case)


def deal(case: OnlineCase, target: Target, count: int) -> list[Job]:
    """The case in ``count`` parts of nearly equal size."""
    return [
        Job(target, len(range(part, case.clients, count)), list(case.shots[part::count]))
        for part in range(count)
    ]


def summarize(case: OnlineCase, outcomes: Sequence[Outcome], start: float) -> OnlineRow:
    """The row of a case that began at ``start`` (``time.perf_counter``).

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
        tok_s=sum(answer.tokens for answer in good if not answer.long) / seconds,
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
    """A quantile of seconds, in milliseconds; None without values."""
    if not values:
        return None
    values = sorted(values)
    return 1e3 * values[min(len(values) - 1, int(q * len(values)))]


def _receive(
    processes: Sequence[_Process], show: Callable[[int], None] | None = None
) -> list[bytes]:
    """The next message of each process; ``show`` is called with the answered requests meanwhile."""
    silent = {one.pipe for one in processes}
    while show is not None and silent:
        silent -= set(wait(silent, WATCH_SECONDS))
        show(sum(one.num_done.value for one in processes))
    try:
        return [one.pipe.recv_bytes() for one in processes]
    except EOFError:
        raise AsyncLLMError("a process that makes the load has ended") from None
