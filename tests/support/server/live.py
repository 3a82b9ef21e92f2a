"""Waiting for what a server in another process does."""

from __future__ import annotations

import http.client
import time
from contextlib import closing


def until_live(port: int, *, running: int, waiting: int = 0, seconds: float = 40.0) -> None:
    """Wait until a server without API keys has so many requests."""
    wanted = {"asyncllm_requests_running": running, "asyncllm_requests_waiting": waiting}
    end = time.monotonic() + seconds
    while (found := {name: value for name, value in _gauges(port) if name in wanted}) != wanted:
        assert time.monotonic() < end, f"it never had {wanted}, but {found}"
        time.sleep(0.02)


def _gauges(port: int) -> list[tuple[str, float]]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return [(name, float(value)) for name, value in pairs]
