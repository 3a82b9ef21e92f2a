"""The metrics of the server around an engine, those that have vLLM's names, and GET /metrics."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from asyncllm.server.http.traffic import TRAFFIC, Traffic, Waits
from asyncllm.server.metrics import engine
from asyncllm.server.metrics.metric import (
    CONTENT_TYPE,
    Kind,
    Metric,
    Value,
    counter,
    counters,
    gauge,
    histogram,
    waits,
    write,
)
from asyncllm.server.service import SERVICE, Service
from asyncllm.server.streaming.write_times import WRITE_TIMES, WriteTimes

#: The device's share of busy time is of the latest so many seconds, or a little more.
BUSY_SECONDS: Final = 10.0
#: How often the event loop's lag is measured.
LAG_SECONDS: Final = 0.05
#: How long a text is kept: however many ask, it is made at most ten times a second.
KEPT_SECONDS: Final = 0.1


class BusyShare:
    """How much of the latest seconds the device was busy, from samples of the time it was so."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def sample(self, now: float, busy: float) -> None:
        """``busy``: seconds in which the device ran steps, in all."""
        self._samples.append((now, busy))
        while len(self._samples) > 1 and self._samples[1][0] <= now - BUSY_SECONDS:
            self._samples.popleft()

    @property
    def share(self) -> float:
        """0 to 1; 0 before there are two samples."""
        if len(self._samples) < 2:
            return 0.0
        (begun, before), (now, busy) = self._samples[0], self._samples[-1]
        return min(1.0, (busy - before) / (now - begun))


@dataclass
class Measured:
    """Everything that the server's metrics are read from."""

    service: Service
    traffic: Traffic
    writes: WriteTimes
    lag: Waits = field(default_factory=Waits)
    busy: BusyShare = field(default_factory=BusyShare)


METRICS: Final[tuple[Metric[Measured], ...]] = (
    gauge("ready", "1 when serving.", lambda m: m.service.llm.ready and not m.service.draining),
    gauge("http_requests_live", "HTTP requests being answered.", lambda m: len(m.service.live)),
    gauge(
        "requests_reserved",
        "Requests that hold a place in the queue while their text is tokenized.",
        lambda m: m.service.llm.num_reserved if m.service.llm.ready else 0,
    ),
    histogram(
        "time_to_first_token_seconds",
        "From a streamed request's arrival until its first token was written to the socket.",
        "writes.first",
    ),
    histogram(
        "inter_token_latency_seconds",
        "Between writes of tokens to the socket of one stream.",
        "writes.between",
    ),
    counters(
        "requests_refused",
        "cause",
        "Requests refused before they reached the engine, by cause.",
        "traffic.refusals.counts",
    ),
    gauge("connections_open", "Client connections, idle or not.", "traffic.crowd.num_open"),
    gauge(
        "open_files_limit",
        "How many files the process may have open; each connection is one.",
        "traffic.crowd.limit.files",
    ),
    counters(
        "connections_crowded",
        "outcome",
        "Connections closed while idle, or refused, near the limit of open files.",
        "traffic.crowd.counts",
    ),
    gauge(
        "unsent_bytes",
        "Bytes of answers kept for clients that read slowly.",
        "traffic.slow_clients.kept",
    ),
    counters(
        "slow_readers_cut",
        "cause",
        "Clients cut off because they did not read.",
        "traffic.slow_clients.counts",
    ),
    gauge(
        "device_busy_share",
        f"Share of the latest {BUSY_SECONDS:g} s in which the device ran steps; 0 to 1.",
        "busy.share",
    ),
    gauge("event_loop_lag_last_seconds", "The latest measurement.", "lag.last"),
    *waits("event_loop_lag_seconds", "Delay of due timers.", "lag"),
    *waits(
        "accept_wait_seconds",
        "From a connection's first bytes until it was accepted.",
        "traffic.accept_waits",
    ),
    *waits(
        "start_wait_seconds",
        "From the end of a request's body until its handling began.",
        "service.start_waits",
    ),
    gauge(
        "request_body_bytes",
        "Bytes of request bodies that are being read or are allowed to be read.",
        "service.bodies.reserved",
    ),
    gauge("request_bodies_waiting", "Bodies that wait to be read.", "service.bodies.waiting"),
    # Scrapes are answered on the loop's own thread.
    counter(
        "event_loop_cpu_seconds",
        "CPU time of the event loop's thread.",
        lambda _: time.thread_time(),
    ),
)


# For ``--metrics-compat vllm``. llm-d's router and the Gateway API inference extension read the
# first four by name, of any model server; vLLM's own dashboard and llm-d's scorers the others.
# Neither vLLM without adapters nor this server has ``vllm:lora_requests_info``.


def _stat(name: str, kind: Kind, meaning: str, path: str) -> Metric[Measured]:
    return Metric(f"vllm:{name}", kind, meaning, f"service.llm.stats.{path}")


def _used(measured: Measured) -> float:
    stats = measured.service.llm.stats
    return stats.pages_held / stats.pages_total if stats.pages_total else 0.0


def _cache_config(measured: Measured) -> Value:
    limits = measured.service.llm.limits
    return {(str(limits.page_size), str(limits.num_pages), str(limits.prefix_caching)): 1.0}


VLLM_METRICS: Final[tuple[Metric[Measured], ...]] = (
    _stat("num_requests_running", "gauge", "Requests in the running batch.", "running"),
    _stat("num_requests_waiting", "gauge", "Requests that wait.", "waiting"),
    Metric("vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use; 0 to 1.", _used),
    Metric(
        "vllm:cache_config_info",
        "gauge",
        "The KV cache: tokens of a page, and pages.",
        _cache_config,
        ("block_size", "num_gpu_blocks", "enable_prefix_caching"),
    ),
    _stat("num_preemptions_total", "counter", "Preemptions.", "preemptions"),
    _stat("prompt_tokens_total", "counter", "Prompt tokens.", "prompt_tokens"),
    _stat("generation_tokens_total", "counter", "Tokens generated.", "generation_tokens"),
    _stat(
        "prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        "admitted_tokens",
    ),
    _stat(
        "prefix_cache_hits_total",
        "counter",
        "Prompt tokens found in the prefix cache.",
        "cached_tokens",
    ),
    Metric(
        "vllm:request_success_total",
        "counter",
        "Ended requests, by reason.",
        "service.llm.stats.finished",
        ("finished_reason",),
    ),
    _stat("request_queue_time_seconds", "histogram", "Time in the queue.", "queue_time"),
    _stat(
        "e2e_request_latency_seconds",
        "histogram",
        "From arrival to the last token.",
        "request_latency",
    ),
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "As asyncllm_time_to_first_token_seconds.",
        "writes.first",
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "As asyncllm_inter_token_latency_seconds.",
        "writes.between",
    ),
)


def vllm_labels(measured: Measured) -> dict[str, str]:
    """What vLLM adds to every sample."""
    return {"model_name": measured.service.model_names[0], "engine": "0"}


class Page:
    """The text of ``/metrics``."""

    def __init__(self, measured: Measured):
        self.measured = measured
        self._body = b""
        self._made_at = -KEPT_SECONDS

    def body(self) -> bytes:
        """The text, at most ``KEPT_SECONDS`` old."""
        now = time.monotonic()
        if now - self._made_at >= KEPT_SECONDS:
            self._body, self._made_at = self.write().encode(), now
        return self._body

    def write(self) -> str:
        """The text as of now; an engine that is not ready has none yet."""
        service = self.measured.service
        text = write(METRICS, self.measured)
        if service.llm.ready:
            text += write(engine.METRICS, service.llm.stats)
            if service.config.metrics_compat == "vllm":
                text += write(VLLM_METRICS, self.measured, vllm_labels(self.measured))
        return text


PAGE: Final = web.AppKey("asyncllm_metrics", Page)


def add_metrics(app: web.Application) -> None:
    """Give the app a page of its own, so that several apps in one process do not mix."""
    measured = Measured(app[SERVICE], app[TRAFFIC], app[WRITE_TIMES])
    app[PAGE] = Page(measured)

    async def measure(_app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(measure_loop(measured), name="asyncllm-loop-lag")
        yield
        task.cancel()

    app.cleanup_ctx.append(measure)


async def measure_loop(measured: Measured) -> None:
    """Observe how late timers of the event loop run, to a millisecond, and how busy the device is.

    ``result_lag`` is exact, but known only while steps run. How long connections wait to be
    accepted and requests to begin is in ``accept_wait`` and ``start_wait``.
    """
    llm = measured.service.llm
    while True:
        due = time.perf_counter() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        now = time.perf_counter()
        if llm.ready:  # while a model is loaded, imports hold the loop up
            measured.lag.observe(max(0.0, now - due))
            measured.busy.sample(now, llm.stats.device_busy)


async def metrics(request: web.Request) -> web.Response:
    body = request.app[PAGE].body()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
