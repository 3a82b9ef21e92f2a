"""GET /metrics: the engine's statistics for Prometheus, read when scraped."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from asyncllm.engine.stats import Distribution, EngineStats, Histogram
from asyncllm.server.http.cuts import CUTS, Cuts
from asyncllm.server.http.waits import ACCEPT_WAITS, RECENT_SECONDS, Waits
from asyncllm.server.service import SERVICE, Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

_GAUGES = {
    "requests_running": ("running", "Requests in the running batch."),
    "requests_waiting": ("waiting", "Requests waiting for the batch."),
    "kv_pages_held": ("pages_held", "KV pages of live requests."),
    "kv_pages_cached": ("pages_cached", "KV pages kept for prefix reuse only."),
    "kv_pages_pinned": ("pages_pinned", "KV pages that requests have pinned, as of the last step."),
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
    "kv_pages_dropped": (
        "pages_dropped",
        "Evicted KV pages that the host tier had no time to save.",
    ),
    "pins": ("pins", "Requests that have pinned their prefix."),
    "kv_pinned_pages_evicted": (
        "pinned_pages_evicted",
        "KV pages that made room for others before their pin's time.",
    ),
    "steps": ("steps", "Model steps."),
    "step_errors": ("step_errors", "Model steps that failed."),
    "plan_seconds": ("cpu_plan", "Time of the event loop spent on planning steps."),
    "apply_seconds": ("cpu_apply", "Time of the event loop spent on applying results."),
    "deliver_seconds": ("cpu_deliver", "Time of the event loop spent on text and delivery."),
    "launch_seconds": ("cpu_launch", "Time of the executor thread spent on launching steps."),
    "collect_seconds": (
        "cpu_collect",
        "Time of the executor thread spent on reading results, without waiting for them.",
    ),
    "device_busy_seconds": ("device_busy", "Time in which the device ran steps."),
    "device_active_seconds": ("device_active", "Time with a step in flight."),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token", "From arrival to the first token."),
    "inter_token_latency_seconds": ("inter_token_latency", "Between tokens of one request."),
    "queue_time_seconds": ("queue_time", "From arrival to the first step."),
    "request_latency_seconds": ("request_latency", "From arrival to the last token."),
    "step_tokens": ("step_tokens", "Tokens in one step, those of prompt chunks included."),
}
_DISTRIBUTIONS = {
    "launch_gap_seconds": (
        "launch_gap",
        "Idle time of the device before a step that was submitted during the one before.",
    ),
    "result_lag_seconds": ("result_lag", "From a step's result to the event loop looking at it."),
}


#: How often the event loop's lag is measured.
LAG_SECONDS: Final = 0.05


async def measure_lag(waits: Waits) -> None:
    """Observe how late timers of the event loop run, to a millisecond.

    ``result_lag`` is exact, but known only while steps run. How long connections wait to be
    accepted and requests to begin is in ``accept_wait`` and ``start_wait``.
    """
    while True:
        due = time.perf_counter() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        waits.observe(max(0.0, time.perf_counter() - due))


class ServiceCollector(Collector):
    """Reads one service when its registry is scraped."""

    def __init__(self, service: Service, lag: Waits, accepts: Waits, cuts: Cuts):
        self._service = service
        self._lag = lag
        self._accepts = accepts
        self._cuts = cuts

    def collect(self) -> Iterator[Metric]:
        service, bodies = self._service, self._service.bodies
        yield _gauge("ready", service.llm.ready and not service.draining, "1 when serving.")
        yield _gauge("http_requests_live", len(service.live), "HTTP requests being answered.")
        yield _gauge("event_loop_lag_last_seconds", self._lag.last, "The latest measurement.")
        yield from _waits("event_loop_lag_seconds", self._lag, "Delay of due timers.")
        text = "From a connection's first bytes until it was accepted."
        yield from _waits("accept_wait_seconds", self._accepts, text)
        text = "From a request's body until the request began to be looked at."
        yield from _waits("start_wait_seconds", service.start_waits, text)
        text = "Clients cut off because they did not read."
        yield _counters("slow_readers_cut", self._cuts.counts, "cause", text)
        text = "Bytes of request bodies that are being read, or may be."
        yield _gauge("request_body_bytes", bodies.held, text)
        yield _gauge("request_bodies_waiting", bodies.waiting, "Bodies that wait to be read.")
        # Scrapes are answered on the loop's own thread.
        yield _counter("event_loop_cpu_seconds", time.thread_time(), "CPU time of its thread.")
        if service.llm.ready:
            text = "Requests that have a place in the queue and are not in it yet."
            yield _gauge("requests_reserved", service.llm.num_reserved, text)
            yield from engine_metrics(service.llm.stats)


def engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    """The metrics of one engine."""
    for name, (field, text) in _GAUGES.items():
        yield _gauge(name, getattr(stats, field), text)
    for name, (field, text) in _COUNTERS.items():
        yield _counter(name, getattr(stats, field), text)
    text = "Requests by how they ended."
    yield _counters("requests_finished", stats.finished, "reason", text)
    text = "Requests that ended with an error, by cause."
    yield _counters("request_errors", stats.errors, "cause", text)
    for name, (field, text) in _HISTOGRAMS.items():
        yield _histogram(name, getattr(stats, field), text)
    for name, (field, text) in _DISTRIBUTIONS.items():
        yield from _distribution(name, getattr(stats, field), text)


def _gauge(name: str, value: float, text: str) -> Metric:
    gauge = GaugeMetricFamily(f"asyncllm_{name}", text)
    gauge.add_metric([], value)
    return gauge


def _counter(name: str, value: float, text: str) -> Metric:
    counter = CounterMetricFamily(f"asyncllm_{name}", text)
    counter.add_metric([], value)
    return counter


def _counters(name: str, counts: Mapping[str, int], label: str, text: str) -> Metric:
    """A counter for each value of a label."""
    family = CounterMetricFamily(f"asyncllm_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _distribution(name: str, values: Distribution, text: str) -> Iterator[Metric]:
    """A histogram, and the exact p99 of the latest observations."""
    yield _histogram(name, values.histogram, text)
    p99 = values.percentile(99)
    if p99 is not None:
        text += f" p99 of the latest {values.KEPT}."
        yield _gauge(f"{name.removesuffix('_seconds')}_p99_seconds", p99, text)


def _waits(name: str, waits: Waits, text: str) -> Iterator[Metric]:
    yield from _distribution(name, waits.distribution, text)
    name = f"{name.removesuffix('_seconds')}_max_seconds"
    text += f" The longest of the latest {RECENT_SECONDS:g} s or more."
    yield _gauge(name, waits.longest, text)


def _histogram(name: str, values: Histogram, text: str) -> Metric:
    histogram = HistogramMetricFamily(f"asyncllm_{name}", text)
    histogram.add_metric([], buckets=values.cumulative(), sum_value=values.total)
    return histogram


REGISTRY = web.AppKey("asyncllm_registry", CollectorRegistry)


def add_metrics(app: web.Application) -> None:
    """Give the app its own registry, so that several apps in one process do not mix."""
    lag = Waits()
    app[REGISTRY] = CollectorRegistry()
    collector = ServiceCollector(app[SERVICE], lag, app[ACCEPT_WAITS], app[CUTS])
    app[REGISTRY].register(collector)

    async def measure(_app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(measure_lag(lag), name="asyncllm-loop-lag")
        yield
        task.cancel()

    app.cleanup_ctx.append(measure)


async def metrics(request: web.Request) -> web.Response:
    body = generate_latest(request.app[REGISTRY])
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
