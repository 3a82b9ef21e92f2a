"""The online cases: dealt out to processes that make the load, and what they saw put together."""

from __future__ import annotations

import multiprocessing
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from asyncllm.bench.cases import OnlineCase, warm_up
from asyncllm.bench.load import Answered, Job, Outcome, Target, process_main
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
        self._processes: list[tuple[BaseProcess, Pipe]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for process, pipe in self._processes:
            pipe.close()
            process.terminate()
            process.join()

    def run(self, case: OnlineCase) -> OnlineRow:
        """Make the load of one case.

        Raises:
            AsyncLLMError: no request was answered; the message has the first failure.
        """
        pipes = self._pipes(min(self._most, -(-case.most_at_once // STREAMS)))
        for pipe, job in zip(pipes, deal(case, self.target, len(pipes)), strict=True):
            pipe.send_bytes(msgspec.msgpack.encode(job))
        _receive(pipes)
        watch = Watch(self.target.url, self.target.api_key)
        start = time.perf_counter() + HEAD_START
        for pipe in pipes:
            pipe.send_bytes(msgspec.msgpack.encode(start))
        outcomes = [msgspec.msgpack.decode(data, type=Outcome) for data in _receive(pipes)]
        row = summarize(case, outcomes, start)
        row.engine = watch.look(row.seconds)
        return row

    def _pipes(self, count: int) -> list[Pipe]:
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=process_main, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # so that its end shows here
            self._processes.append((process, ours))
        return [pipe for _, pipe in self._processes[:count]]


def run_cases(target: Target, cases: Sequence[OnlineCase], seed: int = 0) -> Iterator[OnlineRow]:
    """Warm the server up, and then run one case after the other."""
    with Load(target) as load:
        load.run(warm_up(max(case.most_at_once for case in cases), seed))
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
        tpot.append((came[-1] - came[0]) / max(1, answer.num_out - 1))
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


def _receive(pipes: Sequence[Pipe]) -> list[bytes]:
    try:
        return [pipe.recv_bytes() for pipe in pipes]
    except EOFError:
        raise AsyncLLMError("a process that makes the load has ended") from None
