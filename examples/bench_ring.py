"""How long a message takes through the ring that tensor-parallel peers get their plans by.

    python examples/bench_ring.py            # a table, about 20 s; Linux only
    python examples/bench_ring.py --quick

Readers are processes of their own. A message's time is from before it is sent until a reader has it
(the machine's clock is the same for all processes). Between messages the writer sleeps, so that
readers sleep too, as they do between two steps. "send" is how long the writer is busy with one.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from asyncllm.wire.ring import RingWriter
from asyncllm.wire.ring_reader import RingReader

SIZES: Final = {"200 B": 200, "4 KB": 4_000, "400 KB": 400_000}
READERS: Final = (1, 3)


def read_all(fds: Sequence[int]) -> None:
    """A reader: takes all messages, then prints when it had each, in ns."""
    reader = RingReader(*fds)
    print("ready", flush=True)
    times = []
    while reader.receive() is not None:
        times.append(time.monotonic_ns())
    print(*times, flush=True)


def measure(size: int, num_readers: int, count: int, pause: float) -> tuple[list[float], float]:
    """Every reader's times and the median time of ``send``, in us."""
    writer = RingWriter(num_readers)
    readers = []
    for number in range(num_readers):
        fds = writer.fds_of(number)
        command = [sys.executable, __file__, "--reader", *map(str, fds)]
        readers.append(subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True))
    for reader in readers:
        assert reader.stdout is not None
        reader.stdout.readline()
    message = bytes(size)
    starts, busy = [], []
    for _ in range(count):
        time.sleep(pause)
        starts.append(time.monotonic_ns())
        writer.send(message)
        busy.append(time.monotonic_ns() - starts[-1])
    writer.close()
    took = []
    for reader in readers:
        times = map(int, reader.communicate()[0].split())
        took += [(end - start) / 1000 for start, end in zip(starts, times, strict=True)]
    return took, statistics.median(busy) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the ring to tensor-parallel peers.")
    parser.add_argument("--count", type=int, default=1000, help="messages of each size")
    parser.add_argument("--pause-ms", type=float, default=2.0, help="between two messages")
    parser.add_argument("--quick", action="store_true", help="20 messages of each size")
    parser.add_argument("--reader", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        read_all(args.reader)
        return
    print(f"{'size':>8} {'readers':>8} {'p50 us':>8} {'p99 us':>8} {'send us':>8}")
    for num_readers in READERS:
        for name, size in SIZES.items():
            count = 20 if args.quick else args.count
            took, busy = measure(size, num_readers, count, args.pause_ms / 1000)
            p99 = statistics.quantiles(took, n=100)[-1]
            median = statistics.median(took)
            print(f"{name:>8} {num_readers:>8} {median:>8.1f} {p99:>8.1f} {busy:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
