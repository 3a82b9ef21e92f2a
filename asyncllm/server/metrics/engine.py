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


def _by_tenant(stats: EngineStats) -> dict[str, int]:
    return {tenant: counts.requests for tenant, counts in stats.tenants.labelled()}


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
    gauge("requests_running", "Requests in the running batch.", "running"),
    gauge("requests_waiting", "Requests waiting for the batch.", "waiting"),
    gauge("kv_pages_held", "KV pages of live requests.", "pages_held"),
    gauge("kv_pages_cached", "KV pages kept for prefix reuse only.", "pages_cached"),
    gauge(
        "kv_pages_pinned",
        "KV pages that requests have pinned, as of the last step.",
        "pages_pinned",
    ),
    gauge("kv_pages_total", "KV pages in all.", "pages_total"),
    gauge(
        "kv_host_pages_used",
        "Pages of the host's memory that have KV pages or parts of recurrent states.",
        "host_pages_used",
    ),
    gauge(
        "states_running",
        "Recurrent states of running sequences; 0 for models without recurrent layers.",
        "states_running",
    ),
    gauge("states_cached", "Recurrent states kept for prefix reuse.", "states_cached"),
    gauge(
        "states_on_host",
        "Recurrent states with a copy in the host's memory, for prefix reuse.",
        "states_on_host",
    ),
    gauge("states_total", "Slots for recurrent states in all.", "states_total"),
    counter("prompt_tokens", "Prompt tokens of requests that began to answer.", "prompt_tokens"),
    counter(
        "admitted_prompt_tokens", "Prompt tokens of requests that began to run.", "admitted_tokens"
    ),
    counter(
        "cached_prompt_tokens",
        "Prompt tokens of requests that began to run whose KV was cached.",
        "cached_tokens",
    ),
    counters(
        "prefix_hit_tokens",
        "tier",
        "Cached prompt tokens, by where their KV was: the device or the host's memory.",
        _hits_by_tier,
    ),
    counter("generation_tokens", "Tokens generated.", "generation_tokens"),
    counters("drafts", "kind", "Drafts that the model has verified, by kind.", "drafts"),
    counters(
        "drafted_tokens",
        "kind",
        "Tokens of these drafts, each verified after those before it.",
        "drafted",
    ),
    counters(
        "drafted_tokens_right", "kind", "Of these, the tokens that were right.", "drafted_right"
    ),
    counter("preemptions", "Running requests put back because KV pages ran out.", "preemptions"),
    counter("kv_pages_evicted", "Cached KV pages that made room for others.", "pages_evicted"),
    counter(
        "kv_pages_dropped",
        "Evicted KV pages that the host tier had no time to save.",
        "pages_dropped",
    ),
    counter("states_used", "Sequences that began with a cached recurrent state.", "states_used"),
    counter(
        "states_evicted", "Cached recurrent states that made room for others.", "states_evicted"
    ),
    counter("pins", "Requests that have pinned their prefix.", "pins"),
    counter(
        "kv_pinned_pages_evicted",
        "Pinned KV pages that made room for others before their pin ended.",
        "pinned_pages_evicted",
    ),
    counter(
        "kv_books_checks",
        "Times that the engine was idle and counted its KV pages, slots and states.",
        "books_checks",
    ),
    counter(
        "kv_books_healed",
        "Times that pages, slots or states did not add up and the prefix cache was emptied.",
        "books_healed",
    ),
    counter("steps", "Model steps.", "steps"),
    counter("step_errors", "Model steps that failed.", "step_errors"),
    counter("plan_seconds", "Time of the event loop spent on planning steps.", "cpu_plan"),
    counter("apply_seconds", "Time of the event loop spent on applying results.", "cpu_apply"),
    counter("deliver_seconds", "Time of the event loop spent on text and delivery.", "cpu_deliver"),
    counter(
        "launch_seconds", "Time of the executor thread spent on launching steps.", "cpu_launch"
    ),
    counter(
        "collect_seconds",
        "Time of the executor thread spent on reading results, without waiting for them.",
        "cpu_collect",
    ),
    counter("device_busy_seconds", "Time in which the device ran steps.", "device_busy"),
    counter("device_active_seconds", "Time with a step in flight.", "device_active"),
    counters("requests_finished", "reason", "Ended requests, by reason.", "finished"),
    counters("request_errors", "cause", "Requests that ended with an error, by cause.", "errors"),
    counters("tenant_requests", "tenant", "Requests that ended, by tenant.", _by_tenant),
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
        "time_to_first_token",
    ),
    histogram("queue_time_seconds", "From arrival to the first step.", "queue_time"),
    histogram("request_latency_seconds", "From arrival to the last token.", "request_latency"),
    histogram(
        "cancel_to_free_seconds",
        "From a client's disconnection, or an abort, until the request's KV pages are free.",
        "cancel_to_free",
    ),
    histogram("step_tokens", "Tokens in one step, those of prompt chunks included.", "step_tokens"),
    *distribution(
        "launch_gap_seconds",
        "Idle time of the device before a step that was submitted while the previous one ran.",
        "launch_gap",
    ),
    *distribution(
        "result_lag_seconds", "From a step's result until the event loop read it.", "result_lag"
    ),
)
