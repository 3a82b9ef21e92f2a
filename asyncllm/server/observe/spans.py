"""A span of OpenTelemetry for each request, made when it has ended, from the engine's own trace.

Only this file imports OpenTelemetry, and only a server that was told where to send spans imports
it. A thread of OpenTelemetry's sends them; when nobody takes them, they are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from asyncllm.engine.requests.history import RequestTrace
from asyncllm.engine.tenants import tenant_label
from asyncllm.errors import AsyncLLMError
from asyncllm.server.http.middleware import request_id
from asyncllm.server.limits.api_keys import tenant_of
from asyncllm.server.observe.access_log import Entry
from asyncllm.server.trace import MAX_SEQUENCES, event_fields
from asyncllm.system.daemon_thread import run_in_daemon
from asyncllm.version import __version__

log = logging.getLogger(__name__)

#: How long closing waits for the last spans to be sent.
FLUSH_SECONDS: Final = 1.0
#: How long one attempt to send may take.
SEND_SECONDS: Final = 5.0

#: By route, what OpenTelemetry's conventions for generative AI call it.
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
#: Events of the engine's trace that become events of the span; chunks would be too many.
_EVENTS: Final = frozenset(("queued", "shares", "loading", "admitted", "preempted", "finished"))
#: Parameters of sampling, which have the same names in the conventions.
_PARAMS: Final = (
    *("max_tokens", "temperature", "top_p", "seed"),
    *("frequency_penalty", "presence_penalty"),
)


class Spans:
    """Observes requests; owns OpenTelemetry's provider, which is not the process's global one."""

    def __init__(self, processor: SpanProcessor):
        named = {"service.name": "asyncllm", "service.version": __version__}
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before.
        resource = Resource.create(named).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("asyncllm", __version__)
        self._parent = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Spans:
        """Send them by OTLP over HTTP; a URL without a path gets OTLP's own."""
        has_path = urlsplit(endpoint).path.strip("/")
        url = endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces"
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=SEND_SECONDS)))

    async def aclose(self) -> None:
        """Send what is left, but let nobody wait for a collector that does not answer."""
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await run_in_daemon(self._provider.shutdown)
        except TimeoutError:
            log.warning("the last spans could not be sent in %g s", FLUSH_SECONDS)

    def observe(self, entry: Entry) -> None:
        """Make the span of a request that has ended; not of probes and scrapes."""
        if entry.is_probe:
            return
        traces = entry.traces() or []
        operation = _OPERATIONS.get(entry.route, "")
        name = f"{operation} {entry.model}".rstrip()
        attributes = _attributes(entry, operation, traces)
        span = self._tracer.start_span(
            name or f"{entry.request.method} {entry.route}",
            context=self._parent.extract(entry.request.headers, Context()),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=entry.began_at,
        )
        if span.is_recording():
            for index, trace in enumerate(traces[:MAX_SEQUENCES]):
                choice = {"choice": index} if len(traces) > 1 else {}
                _add_events(span, entry, trace, choice)
            if "error.type" in attributes:
                span.set_status(Status(StatusCode.ERROR))
        span.end(entry.began_at + round(entry.seconds * 1e9))


def _attributes(entry: Entry, operation: str, traces: list[RequestTrace]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": entry.request.method,
        "http.route": entry.route,
        "http.response.status_code": entry.status,
        "asyncllm.request_id": request_id.get(""),
        "asyncllm.tenant": tenant_label(tenant_of(entry.request)),
    }
    if (error := _error_type(entry, traces)) is not None:
        found["error.type"] = error
    if not operation:
        return found
    found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "asyncllm"}
    if entry.model:
        found |= {"gen_ai.request.model": entry.model, "gen_ai.response.model": entry.model}
    if entry.params is not None and operation != "embeddings":
        given = {name: getattr(entry.params, name) for name in _PARAMS}
        found |= {f"gen_ai.request.{n}": value for n, value in given.items() if value is not None}
    if traces:
        found |= {
            "gen_ai.usage.input_tokens": sum(trace.prompt_tokens for trace in traces),
            "gen_ai.usage.output_tokens": sum(trace.completion_tokens for trace in traces),
            "gen_ai.usage.cache_read.input_tokens": sum(trace.cached_tokens for trace in traces),
            "gen_ai.response.finish_reasons": [trace.outcome for trace in traces],
        }
        if len(traces) > 1:
            found["gen_ai.request.choice.count"] = len(traces)
    return found


def _error_type(entry: Entry, traces: list[RequestTrace]) -> str | None:
    """Why it failed: the error's code, or how a sequence of a stream that had begun ended."""
    if entry.status < 400:
        failed = (trace.outcome for trace in traces if trace.outcome in ("error", "deadline"))
        return next(failed, None)
    error = entry.failure
    code = (error.code or error.type) if isinstance(error, AsyncLLMError) else None
    return code or str(entry.status)


def _add_events(span: Span, entry: Entry, trace: RequestTrace, choice: dict[str, int]) -> None:
    """The engine's clock need not be ours: only differences count."""
    queued_at = entry.began_at + round(entry.queued_after * 1e9)

    def wall(time: float) -> int:
        return queued_at + round((time - trace.arrived) * 1e9)

    events = [
        (event.time, event.kind, event_fields(event))
        for event in trace.events
        if event.kind in _EVENTS
    ]
    if trace.first_token is not None:
        events.append((trace.first_token, "first_token", {}))
    for time, kind, values in sorted(events, key=lambda event: event[0]):
        span.add_event(kind, {**choice, **values}, wall(time))
