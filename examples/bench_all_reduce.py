"""Microseconds of a sum over GPUs, the residual and the norm, in a CUDA graph: ours and NCCL's.

    python examples/bench_all_reduce.py --tp 2

Every rank is a process with a GPU of its own. A graph has many sums, one after the other, as the
layers of a model do; each is checked once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.types import Norm
from asyncllm.parallel.collectives import Collectives
from asyncllm.parallel.group import GroupRanks, join, open_store
from asyncllm.parallel.push import PushCollectives

HIDDEN = 4096
#: The last sum is larger than those that are pushed.
ROWS = (1, 8, 32, 128, 256, 512, 1536, 2048)
#: Sums of a graph, and replays of a measurement.
SUMS, REPLAYS = 64, 20


def seconds_each(step: Callable[[], object], ranks: GroupRanks) -> float:
    """The best of some measurements of many replays of a graph of many steps."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        for _ in range(SUMS):
            step()
        graph.capture_end()
        best = float("inf")
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            ranks.least(0)
            graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3 / REPLAYS / SUMS)
    ranks.least(0)
    return best


def check(collectives: Collectives, rows: int, ranks: GroupRanks, device: torch.device) -> None:
    """Compare a sum with all parts, which every rank can make."""
    parts = []
    for rank in range(ranks.size):
        generator = torch.Generator(device).manual_seed(rank)
        shape = (rows, HIDDEN)
        parts.append(torch.randn(shape, generator=generator, device=device).bfloat16())
    total = collectives.sum(parts[ranks.rank].clone(), torch.ones_like(parts[0]))
    expected = torch.stack(parts).double().sum(dim=0) + 1
    torch.testing.assert_close(total.double(), expected, rtol=2e-2, atol=4e-2)


def measure(ranks: GroupRanks, device: torch.device) -> None:
    push = ranks._tensors
    if not isinstance(push, PushCollectives):
        raise SystemExit("the GPUs cannot push to each other")
    nccl = push._larger
    norm = Norm(torch.ones(HIDDEN, device=device, dtype=torch.bfloat16), 1e-6, False)
    if ranks.rank == 0:
        print(f"{ranks.size} x {torch.cuda.get_device_name(device)}, bfloat16, microseconds")
        print(f"{'KiB':>7}  {'ours':>6}  {'+ norm':>6}  {'NCCL':>6}  {'+ norm':>6}")
    for rows in ROWS:
        times = []
        for collectives in (push, nccl):
            check(collectives, rows, ranks, device)
            x = torch.zeros(rows, HIDDEN, device=device, dtype=torch.bfloat16)
            residual = torch.zeros_like(x)

            def add(collectives: Collectives = collectives, x: Tensor = x) -> Tensor:
                return collectives.sum(x, residual)  # noqa: B023

            def add_and_norm(add: Callable[[], Tensor] = add) -> Tensor:
                return rms_norm(add(), norm)

            times += [seconds_each(add, ranks), seconds_each(add_and_norm, ranks)]
        if ranks.rank == 0:
            row = "  ".join(f"{1e6 * time:6.1f}" for time in times)
            print(f"{rows * HIDDEN * 2 // 1024:7}  {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        device = torch.device("cuda", args.rank)
        torch.cuda.set_device(device)
        with torch.inference_mode():
            store = open_store(args.store, args.tp)
            ranks = join(store, args.rank, args.tp, device)
            measure(ranks, device)
            ranks.close()
        return
    if torch.cuda.device_count() < args.tp:
        raise SystemExit(f"needs {args.tp} GPUs")
    store_file = os.memfd_create("bench")
    command = [sys.executable, __file__, "--tp", str(args.tp), "--store", str(store_file)]
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], pass_fds=[store_file])
        for rank in range(args.tp)
    ]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
