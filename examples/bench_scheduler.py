"""What scheduling costs on the event loop: microseconds of CPU, printed as tables.

    python examples/bench_scheduler.py [--steps 400] [--rounds 5] [--quick]

Part 1 drives the real scheduler with made-up results, two steps in flight as the engine does it: so
many sequences decode, their pages grow, and about one a step ends and another takes its place. The
number waiting must not matter. Part 2 is the prefix cache with one prompt of 8,000 tokens, part 3
the waiting queue. Each figure is the least of the rounds' medians. Part 4 is the longest pauses of
the loop: large plans, the least of the rounds' longest, and garbage collections.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import msgspec
from loop_pauses import bench_pauses
from tqdm import tqdm

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.policy import POLICIES
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.step import Planned
from asyncllm.engine.scheduling.waiting.queue import WaitingQueue
from asyncllm.types import SamplingParams, SchedulingParams
from asyncllm.wire.messages import StepResult, pack

ROWS = (1, 16, 64, 256, 1024)
WAITING = (10, 10_000)
PAGE_SIZE = 16
NUM_PROMPT = 40
LONG_PROMPT = 8000
#: Outputs are at least so long; with more rows as many tokens as rows, so that one ends a step.
LEAST_OUTPUT = 64
TENANTS = 8
TOKEN = 11


class Sequences:
    """Makes sequences whose prompts begin like no other, of a few tenants and priorities."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, num_prompt: int, num_output: int, arrival: float = 0.0) -> Sequence:
        self.made += 1
        # Some end token, so that the length is not certain: the usual case.
        return Sequence(
            self.made,
            [self.made, *range(1, num_prompt)],
            SamplingParams(max_tokens=num_output),
            SchedulingParams(priority=self.made % 3, tenant=f"tenant {self.made % TENANTS}"),
            max_length=num_prompt + num_output,
            eos_ids=(2,),
            seed=0,
            arrival=arrival,
        )


class Cost(NamedTuple):
    """Seconds a step, and how many rows and admissions it had on average."""

    plan: float
    apply: float
    rows: float
    admissions: float


class Load:
    """A scheduler that is kept busy: as many rows as there are slots, as many waiting as asked."""

    def __init__(self, num_rows: int, num_waiting: int, *, churn: bool):
        self.output = max(LEAST_OUTPUT, num_rows) if churn else 100_000
        pages = (NUM_PROMPT + self.output) // PAGE_SIZE + 2 if churn else 500
        self.scheduler = Scheduler.create(
            limits(num_rows, num_pages=2 * num_rows * pages), POLICIES["fair"]()
        )
        self._num_rows = num_rows
        self._num_waiting = num_waiting
        self._sequences = Sequences()
        self._in_flight: list[Planned] = []
        self._idle = False
        self._step = 0
        self._now = 0.0
        for row in range(num_rows):  # their ends are spread evenly
            output = 1 + (row + 1) * self.output // num_rows if churn else self.output
            self.scheduler.add(self._sequences(NUM_PROMPT + row % PAGE_SIZE, output), 0.0)
        while self.scheduler.backlog.num_waiting:
            self.step()
        # Until all of them have been replaced by such as everybody else will be.
        for _ in range(200 + (self.output if churn else 0)):
            self.step()
            self.refill()

    def refill(self) -> None:
        while self.scheduler.backlog.num_waiting < self._num_waiting:
            self._now += 1e-4
            sequence = self._sequences(NUM_PROMPT, self.output, self._now)
            self.scheduler.add(sequence, self._now)

    def step(self) -> tuple[float, float, Planned | None]:
        """One step in, one step out, as in the engine; seconds of plan() and of apply()."""
        clock = time.perf_counter
        self._now += 0.01
        result = None
        if len(self._in_flight) == 2 or self._idle:
            oldest = self._in_flight.pop(0)
            # The longer the step the more there is to compute; exactly how does not matter.
            seconds = 0.005 + 2e-5 * oldest.num_tokens
            num_rows = len(oldest.message.rows) // 12
            tokens = pack([TOKEN] * num_rows)
            result = StepResult(oldest.message.step, tokens, (), None, 0.0, 0.0, (), seconds)
        began = clock()
        if result is not None:
            self.scheduler.apply(result, self._now)
        applied = clock()
        planned = self.scheduler.plan(self._step, self._now)
        ended = clock()
        self._idle = planned is None
        if planned is not None:
            self._in_flight.append(planned)
            self._step += 1
        return ended - applied, applied - began, planned

    def measure(self, steps: int) -> Cost:
        plans, applies, rows, admissions = [], [], 0, 0
        for _ in range(steps):
            plan, apply, planned = self.step()
            plans.append(plan)
            applies.append(apply)
            if planned is not None:
                rows += len(planned.message.rows) // 12
                admissions += len(planned.admitted)
            self.refill()
        return Cost(
            statistics.median(plans), statistics.median(applies), rows / steps, admissions / steps
        )


def limits(num_rows: int, num_pages: int) -> EngineLimits:
    return EngineLimits(
        device="cpu",
        dtype="float32",
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_model_len=200_000,
        max_num_seqs=num_rows,
        max_num_batched_tokens=8192,
        prefill_chunk=8192,
        itl_target=0.03,
        prefix_caching=True,
        host_pages=0,
        page_copy_seconds=0.0,
        max_waiting=10**9,
        max_waiting_tokens=10**12,
        steps_in_flight=2,
        vocab_size=10**9,
        eos_token_ids=(2,),
    )


def best(costs: list[Cost]) -> Cost:
    return Cost(
        min(cost.plan for cost in costs),
        min(cost.apply for cost in costs),
        statistics.mean(cost.rows for cost in costs),
        statistics.mean(cost.admissions for cost in costs),
    )


def bench_steps(steps: int, rounds: int, most_rows: int) -> None:
    print("one step: microseconds, and microseconds a row")
    titles = ("rows", "waiting", "admitted", "plan", "a row", "apply", "a row")
    widths = (6, 9, 10, 10, 8, 10, 8)
    print("".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)))
    sizes = [rows for rows in ROWS if rows <= most_rows]
    kinds = list(product((False, True), sizes, WAITING))
    for churn, num_rows, num_waiting in tqdm(kinds, unit="line", disable=None):
        load = Load(num_rows, num_waiting, churn=churn)
        cost = best([load.measure(steps) for _ in range(rounds)])
        plan, apply = 1e6 * cost.plan, 1e6 * cost.apply
        tqdm.write(
            f"{num_rows:>6}{num_waiting:>9}{cost.admissions:>10.2f}"
            f"{plan:>10.1f}{plan / cost.rows:>8.3f}{apply:>10.1f}{apply / cost.rows:>8.3f}"
        )


# -- the prefix cache ------------------------------------------------------------------------------


def bench_cache(rounds: int) -> None:
    print(f"\nthe prefix cache: microseconds for a prompt of {LONG_PROMPT:,} tokens")
    kinds: dict[str, list[float]] = {}
    sequences = Sequences()
    cache = KVCacheManager(4 * LONG_PROMPT // PAGE_SIZE, PAGE_SIZE)
    for _ in range(20 * rounds):
        first = sequences(LONG_PROMPT, 10)
        second = sequences(LONG_PROMPT, 10)
        second.tokens = first.tokens
        for name, seconds in (*compute(cache, first), *reuse(cache, second)):
            kinds.setdefault(name, []).append(seconds)
    for name, times in kinds.items():
        print(f"{name:>28}{1e6 * statistics.median(times):>10.1f}")


def compute(cache: KVCacheManager, seq: Sequence) -> Iterator[tuple[str, float]]:
    """A prompt that is new, and is given up when it has been computed."""
    yield "match, nothing known", seconds_of(lambda: cache.hold(seq.kv, cache.match(seq.kv)))
    yield "take pages, evicting others", seconds_of(lambda: cache.extend(seq.kv, LONG_PROMPT))
    yield "insert (a chunk is planned)", seconds_of(lambda: cache.begin(seq.kv, LONG_PROMPT))
    yield "ready (it is computed)", seconds_of(lambda: cache.computed(seq.kv, LONG_PROMPT))
    yield "release", seconds_of(lambda: cache.release(seq.kv, LONG_PROMPT))


def reuse(cache: KVCacheManager, seq: Sequence) -> Iterator[tuple[str, float]]:
    """A prompt whose pages are all cached."""
    yield "match, all known", seconds_of(lambda: cache.match(seq.kv))
    match = cache.match(seq.kv)
    yield "lock", seconds_of(lambda: cache.hold(seq.kv, match))
    yield "release, shared", seconds_of(lambda: cache.release(seq.kv, 0))


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# -- the waiting queue -----------------------------------------------------------------------------


def bench_queue(rounds: int) -> None:
    print("\nthe waiting queue: microseconds an operation")
    print(f"{'policy':>10}{'waiting':>9}{'push':>8}{'peek':>8}{'serve':>8}")
    for name, policy in POLICIES.items():
        for num_waiting in WAITING:
            medians = queue_costs(WaitingQueue(policy()), num_waiting, 500 * rounds)
            print(
                f"{name:>10}{num_waiting:>9}" + "".join(f"{1e6 * cost:>8.2f}" for cost in medians)
            )


def queue_costs(queue: WaitingQueue, num_waiting: int, repeats: int) -> list[float]:
    """Seconds to push, to peek and to serve, with so many waiting."""
    sequences = Sequences()
    for _ in range(num_waiting):
        queue.push(sequences(NUM_PROMPT, 100, sequences.made / 1e4))
    times: list[tuple[float, float, float]] = []
    for _ in range(repeats):
        new = sequences(NUM_PROMPT, 100, sequences.made / 1e4)
        push = seconds_of(partial(queue.push, new))
        peek = seconds_of(queue.peek)
        head = queue.peek()
        assert head is not None, "there are some"
        times.append((push, peek, seconds_of(partial(queue.serve, head, 300.0))))
    return [statistics.median(column) for column in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the best counts")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    options = parser.parse_args()
    most_rows = max(ROWS)
    if options.quick:
        options.steps, options.rounds, most_rows = 20, 1, 16
    gc.disable()  # which the cost of a step is not to depend on
    bench_steps(options.steps, options.rounds, most_rows)
    bench_cache(options.rounds)
    bench_queue(options.rounds)
    bench_pauses(
        msgspec.structs.replace(limits(256, num_pages=1), itl_target=0.0),
        options.rounds,
        num_waiting=100 if options.quick else 10_000,
    )


if __name__ == "__main__":
    main()
