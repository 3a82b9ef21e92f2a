"""A line in the log every few seconds while the engine is busy: load and throughput."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from asyncllm.engine.stats import EngineStats
from asyncllm.system.json_log import fields

log = logging.getLogger(__name__)

INTERVAL: Final = 10.0


class Throughput:
    """Compares the engine's counters with those of the last call."""

    def __init__(self, stats: EngineStats, now: float):
        self._stats = stats
        self._then = now
        self._counts = self._count()

    def line(self, now: float) -> tuple[str, dict[str, float | None]] | None:
        """What happened since the last call, as text and by name; None if the engine was idle."""
        stats, counts = self._stats, self._count()
        seconds = now - self._then
        prompt, generated, admitted, cached = (
            after - before for after, before in zip(counts, self._counts, strict=True)
        )
        moved = counts != self._counts
        self._then, self._counts = now, counts
        if not (moved or stats.running or stats.waiting):
            return None
        used = stats.pages_held / stats.pages_total if stats.pages_total else 0.0
        hits = cached / admitted if admitted else None
        text = (
            f"running {stats.running}, waiting {stats.waiting}, "
            f"prompts {prompt / seconds:,.1f} tok/s, generated {generated / seconds:,.1f} tok/s, "
            f"KV cache {used:.0%} in use, prefix cache hits "
            + ("-" if hits is None else f"{hits:.0%}")
        )
        return text, {
            "running": stats.running,
            "waiting": stats.waiting,
            "prompt_tokens_per_s": round(prompt / seconds, 1),
            "generated_tokens_per_s": round(generated / seconds, 1),
            "kv_cache_used": round(used, 4),
            "prefix_hits": None if hits is None else round(hits, 4),
        }

    def _count(self) -> tuple[int, int, int, int]:
        stats = self._stats
        return (
            stats.prompt_tokens,
            stats.generation_tokens,
            stats.admitted_tokens,
            stats.cached_tokens,
        )


async def log_throughput(stats: EngineStats, interval: float = INTERVAL) -> None:
    """Log until cancelled. The last line of a busy time shows that nothing runs any more."""
    throughput = Throughput(stats, time.perf_counter())
    while True:
        await asyncio.sleep(interval)
        if line := throughput.line(time.perf_counter()):
            text, values = line
            log.info("%s", text, extra=fields("throughput", values))
