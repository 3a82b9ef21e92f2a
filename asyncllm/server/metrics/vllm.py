"""The names that gateways and dashboards know from vLLM, for ``--metrics-compat vllm``.

llm-d's router and the Gateway API inference extension read the first four by name, of any model
server. The others are what vLLM's own dashboard and llm-d's scorers plot. There is no
``vllm:lora_requests_info``: neither has vLLM without adapters, and gateways do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncllm.server.metrics.metric import Kind, Metric, Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.engine.stats import EngineStats
    from asyncllm.server.metrics.server import Measured


def _stat(
    name: str, kind: Kind, meaning: str, read: Callable[[EngineStats], Value]
) -> Metric[Measured]:
    return Metric(f"vllm:{name}", kind, meaning, lambda m: read(m.service.llm.stats))


def _used(stats: EngineStats) -> float:
    return stats.pages_held / stats.pages_total if stats.pages_total else 0.0


def _cache_config(measured: Measured) -> Value:
    limits = measured.service.llm.limits
    return {(str(limits.page_size), str(limits.num_pages), str(limits.prefix_caching)): 1.0}


def _succeeded(measured: Measured) -> Value:
    return {(reason,): count for reason, count in measured.service.llm.stats.finished.items()}


METRICS: Final[tuple[Metric[Measured], ...]] = (
    _stat("num_requests_running", "gauge", "Requests in the running batch.", lambda s: s.running),
    _stat("num_requests_waiting", "gauge", "Requests that wait.", lambda s: s.waiting),
    _stat("kv_cache_usage_perc", "gauge", "Share of KV pages in use; 0 to 1.", _used),
    Metric(
        "vllm:cache_config_info",
        "gauge",
        "The KV cache: tokens of a page, and pages.",
        _cache_config,
        ("block_size", "num_gpu_blocks", "enable_prefix_caching"),
    ),
    _stat("num_preemptions_total", "counter", "Preemptions.", lambda s: s.preemptions),
    _stat("prompt_tokens_total", "counter", "Prompt tokens.", lambda s: s.prompt_tokens),
    _stat("generation_tokens_total", "counter", "Tokens generated.", lambda s: s.generation_tokens),
    _stat(
        "prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.admitted_tokens,
    ),
    _stat(
        "prefix_cache_hits_total",
        "counter",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.cached_tokens,
    ),
    Metric(
        "vllm:request_success_total",
        "counter",
        "Ended requests, by reason.",
        _succeeded,
        ("finished_reason",),
    ),
    _stat("request_queue_time_seconds", "histogram", "Time in the queue.", lambda s: s.queue_time),
    _stat(
        "e2e_request_latency_seconds",
        "histogram",
        "From arrival to the last token.",
        lambda s: s.request_latency,
    ),
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "As asyncllm_time_to_first_token_seconds.",
        lambda m: m.writes.first,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "As asyncllm_inter_token_latency_seconds.",
        lambda m: m.writes.between,
    ),
)


def labels(measured: Measured) -> dict[str, str]:
    """What vLLM adds to every sample."""
    return {"model_name": measured.service.model_names[0], "engine": "0"}
