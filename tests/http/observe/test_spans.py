"""A span for each request: from the engine's trace, in the caller's trace, and to a collector."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from asyncllm import AsyncLLM
from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.tenants import tenant_label
from asyncllm.errors import BadRequest
from asyncllm.server.app import create_app
from asyncllm.server.observe import spans as spans_module
from asyncllm.server.observe.spans import Spans
from tests.support.server.serving import ServerProcess

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEY = {"Authorization": "Bearer sesame", "X-Request-Id": "mine"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@asynccontextmanager
async def serving(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[TestClient[Any, Any], InMemorySpanExporter]]:
    """The real engine on a simulated device; spans stay in memory."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(Spans, "to", lambda _: Spans(SimpleSpanProcessor(exporter)))
    config = ServerConfig(
        api_key=("sesame",), served_model_name=("m",), otlp_endpoint="http://collector:4318"
    )
    async with (
        AsyncLLM(device="sim", sim_profile="h200-0.6b", max_model_len=512) as llm,
        TestClient(TestServer(create_app(llm, config))) as client,
    ):
        yield client, exporter


def events(span: ReadableSpan) -> dict[str, dict[str, Any]]:
    return {event.name: dict(event.attributes or {}) for event in span.events}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    before = time.time_ns()
    async with serving(monkeypatch) as (client, exporter):
        headers = {**KEY, "traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "x=y"}
        body = {**CHAT, "stream": stream, "temperature": 0.5, "seed": 3, "ignore_eos": True}
        async with client.post("/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
            await answer.read()
        for path in ("/health", "/metrics"):  # have none
            await (await client.get(path, headers=KEY)).read()
    [span] = exporter.get_finished_spans()
    assert span.name == "chat m"
    assert span.kind.name == "SERVER"
    assert format(span.context.trace_id, "032x") == TRACE
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == PARENT
    found = dict(span.attributes or {})
    prompt = found.pop("gen_ai.usage.input_tokens")
    assert isinstance(prompt, int)
    assert prompt > 1
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "asyncllm.request_id": "mine",
        "asyncllm.tenant": tenant_label("key-1"),
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "asyncllm",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert [event.name for event in span.events] == [
        *("queued", "admitted", "first_token", "finished")
    ]
    assert events(span)["admitted"].keys() == {"step", "slot", "cached_tokens"}
    assert span.start_time is not None
    assert span.end_time is not None
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= time.time_ns()
    assert span.status.is_unset
    assert span.resource.attributes["service.name"] == "asyncllm"


async def test_refusals_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as (client, exporter):
        for body in ({**CHAT, "model": "other"}, {**CHAT, "n": 2}):
            async with client.post("/v1/chat/completions", json=body, headers=KEY) as answer:
                await answer.read()
        async with client.post("/nowhere", json={}) as answer:
            assert answer.status == 401
        odd = {**KEY, "traceparent": "00-nonsense"}
        async with client.post("/nowhere", json={}, headers=odd) as answer:
            assert answer.status == 404
    refused, two, keyless, nowhere = exporter.get_finished_spans()
    assert (refused.attributes or {})["error.type"] == "model_not_found"
    assert refused.status.status_code.name == "ERROR"
    assert refused.parent is None
    assert (two.attributes or {})["gen_ai.request.choice.count"] == 2
    assert {event.attributes["choice"] for event in two.events if event.attributes} == {0, 1}
    assert (keyless.attributes or {})["error.type"] == "invalid_api_key"
    assert nowhere.name == "POST /nowhere"
    assert nowhere.parent is None


async def test_a_caller_that_samples_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as (client, exporter):
        headers = {**KEY, "traceparent": f"00-{TRACE}-{PARENT}-00"}
        async with client.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
            assert answer.status == 200
    assert exporter.get_finished_spans() == ()


async def test_an_observer_that_fails_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "_attributes", lambda *_: 1 / 0)
    async with (
        serving(monkeypatch) as (client, _),
        client.post("/v1/chat/completions", json=CHAT, headers=KEY) as answer,
    ):
        assert answer.status == 200


@contextmanager
def collector(*, answers: bool = True) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """OTLP over HTTP; one that does not answer keeps its clients waiting until the end."""
    got: list[tuple[str, bytes]] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            got.append((self.path, body))
            if not answers:
                over.wait(60)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def ask(server: ServerProcess) -> None:
    import urllib.request

    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(CHAT).encode(),
        {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        answer.read()


def test_a_collector_gets_the_last_spans_too() -> None:
    with collector() as (url, got):
        server = ServerProcess("--device", "sim", "--otlp-endpoint", url)
        try:
            ask(server)
        finally:
            assert server.stop() == 0
    [(path, body)] = got
    assert path == "/v1/traces"
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert "asyncllm" in {a.value.string_value for a in resource.resource.attributes}
    [span] = resource.scope_spans[0].spans
    assert span.trace_id.hex() == TRACE
    assert [event.name for event in span.events][:2] == ["queued", "admitted"]


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_a_dead_collector_holds_nobody_up(kind: str) -> None:
    with collector(answers=False) as (url, _):
        if kind == "refuses":
            url = "http://127.0.0.1:9"
        server = ServerProcess("--device", "sim", "--otlp-endpoint", url)
        try:
            for _ in range(3):
                ask(server)
        finally:
            started = time.monotonic()
            assert server.stop() == 0
        assert time.monotonic() - started < 10, "the exporter itself would try for much longer"


def test_nothing_is_imported_unless_it_is_wanted() -> None:
    code = (
        "import sys; from asyncllm import AsyncLLM; from asyncllm.server.app import create_app; "
        "from asyncllm.config.server_config import ServerConfig; "
        "create_app(AsyncLLM(device='sim'), ServerConfig(log_requests=True)); "
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncllm.server.observe.spans", None)
    config, llm = ServerConfig(otlp_endpoint="http://localhost:4318"), AsyncLLM(device="sim")
    with pytest.raises(BadRequest, match=r"otlp_endpoint needs asyncllm-server\[otel\]"):
        create_app(llm, config)
    for url in ("localhost:4318", "ftp://x", "http://", "http://a b"):
        with pytest.raises(BadRequest, match="otlp_endpoint must be like"):
            ServerConfig(otlp_endpoint=url)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://x/own/path", "https://x/own/path"),
    ],
)
def test_where_spans_are_sent(monkeypatch: pytest.MonkeyPatch, given: str, url: str) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(spans_module, "OTLPSpanExporter", lambda **options: made.update(options))
    monkeypatch.setattr(
        spans_module, "BatchSpanProcessor", lambda _: SimpleSpanProcessor(InMemorySpanExporter())
    )
    Spans.to(given)
    assert made["endpoint"] == url
