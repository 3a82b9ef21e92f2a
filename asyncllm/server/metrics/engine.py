"""The metrics of an engine, from its statistics."""

from __future__ import annotations

from typing import Final

from asyncllm.engine.stats import EngineStats
from asyncllm.server.metrics.metric import (
    Metric,
    Value,
    counter,
    counters,
    distribution,
    gauge,
    histogram,
)


def _by_tenant(stats: EngineStats) -> Value:
    return {(tenant,): float(counts.requests) for tenant, counts in stats.tenants.labelled()}


def _tokens_by_tenant(stats: EngineStats) -> Value:
    return {
        (tenant, kind): float(tokens)
        for tenant, counts in stats.tenants.labelled()
        for kind, tokens in (("prompt", counts.prompt), ("generated", counts.generated))
    }


def _hits_by_tier(stats: EngineStats) -> dict[str, float]:
    host = stats.host_cached_tokens
    return {"device": stats.cached_tokens - host, "host": host}


METRICS: Final[tuple[Metric[EngineStats], ...]] = (
    gauge("requests_running", "Requests in the running batch.", lambda s: s.running),
    gauge("requests_waiting", "Requests waiting for the batch.", lambda s: s.waiting),
    gauge("kv_pages_held", "KV pages of live requests.", lambda s: s.pages_held),
    gauge("kv_pages_cached", "KV pages kept for prefix reuse only.", lambda s: s.pages_cached),
    gauge(
        "kv_pages_pinned",
        "KV pages that requests have pinned, as of the last step.",
        lambda s: s.pages_pinned,
    ),
    gauge("kv_pages_total", "KV pages in all.", lambda s: s.pages_total),
    gauge("kv_host_pages_used", "KV pages in the host's memory.", lambda s: s.host_pages_used),
    counter(
        "prompt_tokens",
        "Prompt tokens of requests that began to answer.",
        lambda s: s.prompt_tokens,
    ),
    counter(
        "admitted_prompt_tokens",
        "Prompt tokens of requests that began to run.",
        lambda s: s.admitted_tokens,
    ),
    counter(
        "cached_prompt_tokens",
        "Prompt tokens of requests that began to run whose KV was cached.",
        lambda s: s.cached_tokens,
    ),
    counters(
        "prefix_hit_tokens",
        "tier",
        "Cached prompt tokens, by where their KV was: the device or the host's memory.",
        _hits_by_tier,
    ),
    counter("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    counter(
        "preemptions",
        "Running requests put back because KV pages ran out.",
        lambda s: s.preemptions,
    ),
    counter(
        "kv_pages_evicted", "Cached KV pages that made room for others.", lambda s: s.pages_evicted
    ),
    counter(
        "kv_pages_dropped",
        "Evicted KV pages that the host tier had no time to save.",
        lambda s: s.pages_dropped,
    ),
    counter("pins", "Requests that have pinned their prefix.", lambda s: s.pins),
    counter(
        "kv_pinned_pages_evicted",
        "Pinned KV pages that made room for others before their pin ended.",
        lambda s: s.pinned_pages_evicted,
    ),
    counter(
        "kv_books_checks",
        "Times that the engine was idle and counted its KV pages and slots.",
        lambda s: s.books_checks,
    ),
    counter(
        "kv_books_healed",
        "Times that the count of KV pages and slots was wrong and the prefix cache was emptied.",
        lambda s: s.books_healed,
    ),
    counter("steps", "Model steps.", lambda s: s.steps),
    counter("step_errors", "Model steps that failed.", lambda s: s.step_errors),
    counter(
        "plan_seconds", "Time of the event loop spent on planning steps.", lambda s: s.cpu_plan
    ),
    counter(
        "apply_seconds", "Time of the event loop spent on applying results.", lambda s: s.cpu_apply
    ),
    counter(
        "deliver_seconds",
        "Time of the event loop spent on text and delivery.",
        lambda s: s.cpu_deliver,
    ),
    counter(
        "launch_seconds",
        "Time of the executor thread spent on launching steps.",
        lambda s: s.cpu_launch,
    ),
    counter(
        "collect_seconds",
        "Time of the executor thread spent on reading results, without waiting for them.",
        lambda s: s.cpu_collect,
    ),
    counter("device_busy_seconds", "Time in which the device ran steps.", lambda s: s.device_busy),
    counter("device_active_seconds", "Time with a step in flight.", lambda s: s.device_active),
    counters("requests_finished", "reason", "Ended requests, by reason.", lambda s: s.finished),
    counters(
        "request_errors",
        "cause",
        "Requests that ended with an error, by cause.",
        lambda s: s.errors,
    ),
    Metric(
        "asyncllm_tenant_requests_total",
        "counter",
        "Requests that ended, by tenant.",
        _by_tenant,
        ("tenant",),
    ),
    Metric(
        "asyncllm_tenant_tokens_total",
        "counter",
        "Tokens of requests that ended, by tenant and kind (prompt, generated).",
        _tokens_by_tenant,
        ("tenant", "kind"),
    ),
    histogram(
        "engine_first_token_seconds",
        "From a request's arrival in the engine to its first token there.",
        lambda s: s.time_to_first_token,
    ),
    histogram("queue_time_seconds", "From arrival to the first step.", lambda s: s.queue_time),
    histogram(
        "request_latency_seconds", "From arrival to the last token.", lambda s: s.request_latency
    ),
    histogram(
        "cancel_to_free_seconds",
        "From a client's disconnection, or an abort, until the request's KV pages are free.",
        lambda s: s.cancel_to_free,
    ),
    histogram(
        "step_tokens",
        "Tokens in one step, those of prompt chunks included.",
        lambda s: s.step_tokens,
    ),
    *distribution(
        "launch_gap_seconds",
        "Idle time of the device before a step that was submitted while the previous one ran.",
        lambda s: s.launch_gap,
    ),
    *distribution(
        "result_lag_seconds",
        "From a step's result until the event loop read it.",
        lambda s: s.result_lag,
    ),
)
