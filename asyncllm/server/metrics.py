"""GET /metrics: the engine's own numbers as Prometheus families, read when scraped."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from asyncllm.engine.stats import LATENCY_BUCKETS, EngineStats, Histogram
from asyncllm.server.service import SERVICE, Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from prometheus_client.metrics_core import Metric

_GAUGES = {
    "requests_running": ("running", "Requests in the running batch."),
    "requests_waiting": ("waiting", "Requests waiting for the batch."),
    "kv_pages_held": ("pages_held", "KV pages of live requests."),
    "kv_pages_cached": ("pages_cached", "KV pages kept for prefix reuse only."),
    "kv_pages_total": ("pages_total", "KV pages in all."),
    "kv_host_pages_used": ("host_pages_used", "KV pages in the host's memory."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that began to answer."),
    "cached_prompt_tokens": (
        "cached_tokens",
        "Prompt tokens of requests that began to run whose KV was cached.",
    ),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "preemptions": ("preemptions", "Running requests put back because KV pages ran out."),
    "kv_pages_evicted": ("pages_evicted", "Cached KV pages that made room for others."),
    "steps": ("steps", "Model steps."),
    "step_errors": ("step_errors", "Model steps that failed."),
    "plan_seconds": ("cpu_plan", "Time of the event loop spent on planning steps."),
    "apply_seconds": ("cpu_apply", "Time of the event loop spent on applying results."),
    "deliver_seconds": ("cpu_deliver", "Time of the event loop spent on text and delivery."),
    "device_busy_seconds": ("device_busy", "Time from the launch of a step to its end."),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token", "From arrival to the first token."),
    "inter_token_latency_seconds": ("inter_token_latency", "Between tokens of one request."),
    "queue_time_seconds": ("queue_time", "From arrival to the first step."),
    "request_latency_seconds": ("request_latency", "From arrival to the last token."),
    "step_tokens": ("step_tokens", "Tokens in one step, those of prompt chunks included."),
}


class LoopLag:
    """How late the event loop runs what is due: the time by which every request waits longer."""

    INTERVAL = 0.25

    def __init__(self) -> None:
        self.histogram = Histogram(LATENCY_BUCKETS)
        self.last = 0.0

    async def measure(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.INTERVAL
            await asyncio.sleep(self.INTERVAL)
            self.last = max(0.0, loop.time() - due)
            self.histogram.observe(self.last)


class ServiceCollector(Collector):
    """Reads one service whenever its registry is scraped."""

    def __init__(self, service: Service, lag: LoopLag):
        self._service = service
        self._lag = lag

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield _gauge("ready", service.llm.ready and not service.draining, "1 when serving.")
        yield _gauge("http_requests_live", len(service.live), "HTTP requests being answered.")
        yield _gauge("event_loop_lag_last_seconds", self._lag.last, "The latest measurement.")
        yield _histogram("event_loop_lag_seconds", self._lag.histogram, "Delay of due callbacks.")
        if service.llm.ready:
            yield from _engine(service.llm.stats)


def _engine(stats: EngineStats) -> Iterator[Metric]:
    for name, (field, text) in _GAUGES.items():
        yield _gauge(name, getattr(stats, field), text)
    for name, (field, text) in _COUNTERS.items():
        counter = CounterMetricFamily(f"asyncllm_{name}", text)
        counter.add_metric([], getattr(stats, field))
        yield counter
    finished = CounterMetricFamily(
        "asyncllm_requests_finished", "Requests by how they ended.", labels=["reason"]
    )
    for reason, count in stats.finished.items():
        finished.add_metric([reason], count)
    yield finished
    for name, (field, text) in _HISTOGRAMS.items():
        yield _histogram(name, getattr(stats, field), text)


def _gauge(name: str, value: float, text: str) -> Metric:
    gauge = GaugeMetricFamily(f"asyncllm_{name}", text)
    gauge.add_metric([], value)
    return gauge


def _histogram(name: str, values: Histogram, text: str) -> Metric:
    histogram = HistogramMetricFamily(f"asyncllm_{name}", text)
    histogram.add_metric([], buckets=values.cumulative(), sum_value=values.total)
    return histogram


REGISTRY = web.AppKey("asyncllm_registry", CollectorRegistry)


def add_metrics(app: web.Application) -> None:
    """Give the app a registry of its own, so that several apps in one process do not mix."""
    lag = LoopLag()
    app[REGISTRY] = CollectorRegistry()
    app[REGISTRY].register(ServiceCollector(app[SERVICE], lag))

    async def measure_lag(_app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(lag.measure(), name="asyncllm-loop-lag")
        yield
        task.cancel()

    app.cleanup_ctx.append(measure_lag)


async def metrics(request: web.Request) -> web.Response:
    body = generate_latest(request.app[REGISTRY])
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
