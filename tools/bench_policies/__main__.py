"""Policies compared on published request logs and on hostile loads, on a simulated H200.

    python -m tools.bench_policies LOG... [--policies fair,aged,fcfs] [--speed 4]
    python -m tools.bench_policies --hostile wall

Scheduler and prefix cache are the real ones, and time is virtual (``lab/replay``). A log is a
file of Mooncake (jsonl), Azure or BurstGPT (csv); hostile loads are made up. The scheduler is not
told how long outputs are, and nobody is refused because too many wait.

TTFT and ITL are in ms: to the first token, and between two tokens; the largest ITL is the longest
time that a stream stood still. Hits: share of the prompt tokens found in the prefix cache.
Recomputed: tokens computed again after preemptions, as a share of the prompt tokens computed.

The last row, "SRPT bound", is the TTFT of one server that does nothing but prefill, always the
prompt with the least work left, with a prefix cache without end. Of all orders on one server this
one has the smallest mean (Schrage, 1968), and a real scheduler has decode steps to run besides, so
none has a smaller mean TTFT. Its percentiles are no bounds: another order may have a better p99.

With deadlines, "met" is the share of requests whose last token was in time. Its bound is one server
as fast as the device with full steps. It works for one request at a time, the one due first, and
drops those that take longest when not all can be in time. Requests come 1.15 times as fast as it
could do them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeAlias

import msgspec
import numpy as np

from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.engine.policy import POLICIES
from asyncllm.engine.scheduling.sequence import FOREVER
from asyncllm.errors import AsyncLLMError
from asyncllm.executor.sim.executor import resolve_sim
from asyncllm.executor.sim.shape import SHAPES
from asyncllm.lab.replay.figures import Figures, percentile
from asyncllm.models.spec import ModelSpec, read_spec
from asyncllm.system.terminal import progress_bar, table
from tools.bench_policies.bounds import due_times, edf, prefill_work, srpt, total_work
from tools.bench_policies.hostile import HOSTILE, Hostile, deadlines
from tools.bench_policies.load import Load, serve
from tools.bench_policies.request_log import read_log

#: Arrivals of the load with deadlines, as a multiple of the capacity.
OVERLOAD = 1.15
DEADLINES = "deadlines"
#: Figures by name; times in seconds, shares from 0 to 1; None: there is none.
Row: TypeAlias = dict[str, float | None]
Column: TypeAlias = tuple[str, str, float]

#: Heading, name and factor of each column.
COLUMNS = (
    ("requests", "requests", 1),
    ("TTFT: mean", "ttft_mean", 1e3),
    ("p50", "ttft_p50", 1e3),
    ("p90", "ttft_p90", 1e3),
    ("p99", "ttft_p99", 1e3),
    ("ITL: p50", "itl_p50", 1e3),
    ("p99", "itl_p99", 1e3),
    ("max", "itl_max", 1e3),
    ("hits %", "hits", 100),
    ("preempted", "preemptions", 1),
    ("recomputed %", "recomputed", 100),
    ("tok/s", "throughput", 1),
    ("seconds", "makespan", 1),
)
DEADLINE_COLUMNS = (
    ("requests", "requests", 1),
    ("met %", "met", 100),
    ("refused", "refused", 1),
    ("dropped", "dropped", 1),
    ("their prompt tokens computed", "wasted_prompt_tokens", 1),
    ("their tokens generated", "wasted_tokens", 1),
)


def row_of(figures: Figures) -> Row:
    ttft, itl = np.array(figures.ttft), np.array(figures.itl)
    fresh = figures.prompt_tokens - figures.cached_tokens
    prefilled = sum(record.num_prefilled for record in figures.records)
    dropped = [record for record in figures.records if record.outcome == "dropped"]
    refused = sum(record.outcome == "refused" for record in figures.records)
    return {
        **ttft_of(ttft),
        "requests": figures.num_requests,
        **{f"itl_p{p}": percentile(itl, p) for p in (50, 99)},
        "itl_max": float(itl.max()) if len(itl) else None,
        "hits": figures.cached_share,
        "preemptions": figures.num_preemptions,
        "recomputed": prefilled / fresh - 1 if fresh and not dropped else None,
        "throughput": figures.throughput,
        "makespan": figures.makespan,
        "met": np.mean([record.met for record in figures.records]).item(),
        "refused": refused,
        "dropped": len(dropped),
        "wasted_prompt_tokens": sum(record.num_prefilled for record in dropped),
        "wasted_tokens": sum(len(record.tokens) for record in dropped),
    }


def ttft_of(seconds: Sequence[float] | np.ndarray) -> Row:
    return {
        "requests": len(seconds),
        "ttft_mean": float(np.mean(seconds)) if len(seconds) else None,
        **{f"ttft_p{p}": percentile(seconds, p) for p in (50, 90, 99)},
    }


class Bench:
    """Serves loads on one simulated device, and prints tables."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, policies: list[str]):
        self.limits, self._cost = resolve_sim(config, spec)
        self._policies = policies
        self._step = self.limits.page_size, self.limits.max_num_batched_tokens

    def capacity(self, load: Load) -> float:
        """Requests a second that one server could do whose steps are all full."""
        return len(load.requests) / sum(total_work(load, self._cost, *self._step))

    def compare(self, load: Load) -> dict[str, Row]:
        """Serve a load under each policy."""
        rows: dict[str, Row] = {}
        for policy in self._policies:
            figures = self._serve(load, policy, policy)
            rows[policy] = row_of(figures)
            groups = figures.groups if len(figures.groups) > 1 else []
            rows |= {f"{policy}, {name}": row_of(figures.of_group(name)) for name in groups}
        has_deadlines = any(request.deadline < FOREVER for request in load.requests)
        if not has_deadlines:
            rows["SRPT bound"] = self._srpt(load)
        self._print(load, rows, COLUMNS)
        if has_deadlines:  # some get no token, so the mean TTFT has no bound
            rows |= self._edf(load)
            self._print(load, rows, DEADLINE_COLUMNS)
        return rows

    def _srpt(self, load: Load) -> Row:
        work = prefill_work(load, self._cost, *self._step)
        return ttft_of(srpt([request.arrival for request in load.requests], work))

    def _edf(self, load: Load) -> dict[str, Row]:
        arrivals = [request.arrival for request in load.requests]
        work = total_work(load, self._cost, *self._step)
        met = np.array(edf(arrivals, work, due_times(load, self._cost, self._step[1])))
        groups = np.array([request.group for request in load.requests])
        rows: dict[str, Row] = {"EDF bound": {"requests": len(met), "met": met.mean().item()}}
        for name in dict.fromkeys(groups.tolist()):
            mine = met[groups == name]
            rows[f"EDF bound, {name}"] = {"requests": len(mine), "met": mine.mean().item()}
        return rows

    def _print(self, load: Load, rows: dict[str, Row], columns: tuple[Column, ...]) -> None:
        skipped = "".join(f", {n:,} skipped: {why}" for why, n in load.skipped.items())
        print(f"\n{load.name}: {len(load.requests):,} requests{skipped}")
        cells = [
            [name, *(_cell(row.get(key), by) for _, key, by in columns)]
            for name, row in rows.items()
        ]
        print(table(["", *(head for head, _, _ in columns)], cells), flush=True)

    def _serve(self, load: Load, policy: str, label: str) -> Figures:
        total = len(load.requests)
        with progress_bar(f"{load.name}, {label}", total, "requests", transient=True) as show:
            return serve(
                load, self.limits, self._cost, POLICIES[policy](), lambda ended: show(ended, "")
            )


def _cell(value: float | None, factor: float) -> str:
    if value is None:
        return "-"
    value *= factor
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.1f}"


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if not args.logs and not args.hostile:
        parser.error("name a log, or a load with --hostile")
    config = EngineConfig(
        device="sim",
        sim_profile=args.profile,
        itl_target_ms=args.itl_target_ms,
        host_kv_gib=args.host_kv_gib,
        kv_cache_tokens=args.kv_cache_tokens,
    )
    spec = read_spec(demo.path())
    bench = Bench(config, spec, args.policies)
    loads = [
        read_log(path).select(
            longest=bench.limits.max_model_len,
            speed=args.speed,
            seconds=args.seconds,
            first=args.limit,
        )
        for path in args.logs
    ]
    found: dict[str, dict[str, Row]] = {}
    with open(args.json, "w") if args.json else nullcontext() as out:
        for load in loads:
            found[load.name] = bench.compare(load)
        for name in args.hostile:
            if name == DEADLINES:
                capacity = bench.capacity(deadlines(1.0).load)
                found[name] = bench.compare(deadlines(OVERLOAD * capacity).load)
            else:
                found[name] = compare_hostile(HOSTILE[name](), config, spec, args.policies)
        if out is not None:
            json.dump(found, out, indent=1)


def compare_hostile(
    hostile: Hostile, config: EngineConfig, spec: ModelSpec, policies: list[str]
) -> dict[str, Row]:
    if config.kv_cache_tokens is None:
        config = msgspec.structs.replace(config, kv_cache_tokens=hostile.kv_cache_tokens)
    return Bench(config, spec, policies).compare(hostile.load)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    hostile = [*HOSTILE, DEADLINES]
    add("logs", nargs="*", metavar="LOG", help="file of Mooncake, Azure or BurstGPT")
    add("--hostile", type=some_of(hostile), default=[], metavar="NAME,...", help=", ".join(hostile))
    policies = ["fair", "aged", "fcfs"]
    add("--policies", type=some_of(list(POLICIES)), default=policies, metavar="NAME,...")
    add("--speed", type=positive, default=1.0, help="of arrivals, as a multiple of the log's")
    add("--limit", type=count, metavar="N", help="only the first N requests of a log")
    add("--seconds", type=positive, default=FOREVER, help="only the first seconds of a log")
    add("--itl-target-ms", type=float, default=27.0, help="as of asyncllm serve; 0: none")
    add("--profile", choices=sorted(SHAPES), default="h200-8b", help="model and device")
    add("--kv-cache-tokens", type=int, metavar="N", help="size of the KV cache")
    add("--host-kv-gib", type=float, default=0.0, help="size of its tier in host memory")
    add("--json", metavar="FILE", help="also write the figures here, times in seconds")
    return parser


def positive(text: str) -> float:
    value = float(text)
    if not value > 0.0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def some_of(known: list[str]) -> Callable[[str], list[str]]:
    """Reads names separated by commas."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return read


if __name__ == "__main__":
    try:
        main()
    except (AsyncLLMError, OSError) as error:
        sys.exit(f"error: {error}")
