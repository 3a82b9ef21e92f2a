"""Ports for servers that must know theirs before they start."""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack
from pathlib import Path

LIMITS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(count: int = 1) -> int:
    """A port nobody listens on; with ``count``, the first of so many in a row.

    The system gives any port of its own range to the next connection of any process, which would
    take it from the server that is about to start. So these are outside that range, and each test
    worker has its share of them.
    """
    ports = ports_of_worker(outside(LIMITS))
    while True:
        first = random.SystemRandom().randrange(ports.start, ports.stop - count + 1)
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first


def outside(limits: Path) -> range:
    """The longer of the ranges below and above the ports that the system gives to connections.

    Where it gives all of them, so do we.
    """
    first, last = map(int, limits.read_text().split()) if limits.exists() else (49152, 65535)
    ports = max(range(10000, first), range(last + 1, 65536), key=len)
    return ports if len(ports) >= 1000 else range(10000, 65536)


def ports_of_worker(ports: range) -> range:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = len(ports) // workers
    return ports[worker * share : (worker + 1) * share]
