"""GET /metrics over a socket: who may read it, how old it may be, and by which names."""

from __future__ import annotations

import re
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from asyncllm import AsyncLLM
from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.tenants import MOST_LABELS, OTHER, tenant_label
from asyncllm.errors import BadRequest
from asyncllm.server.app import create_app
from asyncllm.server.metrics.server import KEPT_SECONDS
from tests.support.server.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Server]:
    """As it is set up behind a gateway."""
    config = ServerConfig(
        api_key=("sesame",),
        metrics_keyless=True,
        metrics_compat="vllm",
        served_model_name=('my "model"', "alias"),
    )
    with serving(config=config) as running:
        yield running


def samples(server: Server) -> dict[tuple[str, ...], float]:
    """Every sample as of now, by its name and the values of its labels."""
    time.sleep(KEPT_SECONDS)
    text = server.get("/metrics").body.decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_need_a_key_unless_told_otherwise(gateway: Server) -> None:
    assert gateway.get("/metrics").status == 200
    assert gateway.get("/v1/models").status == 401
    described = gateway.get("/openapi.json", KEY).json["paths"]
    assert "security" not in described["/metrics"]["get"]
    assert "security" in described["/version"]["get"]
    with serving(config=ServerConfig(api_key=("sesame",))) as closed:
        assert closed.get("/metrics").status == 401
        assert closed.get("/metrics", KEY).status == 200
        assert "security" in closed.get("/openapi.json", KEY).json["paths"]["/metrics"]["get"]


def test_a_text_is_kept_for_a_moment(gateway: Server) -> None:
    made = [gateway.get("/metrics").body]
    end = time.monotonic() + 5 * KEPT_SECONDS
    while time.monotonic() < end:
        made.append(gateway.get("/metrics").body)
    # CPU time is among the metrics: a text made anew differs from the one before.
    assert 1 < len(set(made)) <= 7 < len(made)


def test_names_that_gateways_read(gateway: Server) -> None:
    assert gateway.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}, KEY).status == 200
    found, own = samples(gateway), ("0", 'my "model"')
    assert found["vllm:num_requests_waiting", *own] == 0
    assert found["vllm:num_requests_running", *own] == 0
    assert found["vllm:kv_cache_usage_perc", *own] == 0
    limits = gateway.llm.limits
    # By the labels' names: block_size, enable_prefix_caching, engine, model_name, num_gpu_blocks.
    config = (str(limits.page_size), "True", *own, str(limits.num_pages))
    assert found["vllm:cache_config_info", *config] == 1
    text = gateway.get("/metrics").body.decode()
    assert f'block_size="{limits.page_size}",num_gpu_blocks="{limits.num_pages}"' in text
    assert found["vllm:request_success_total", "0", "length", 'my "model"'] >= 1
    assert found["vllm:generation_tokens_total", *own] >= 2


def test_load_as_gateways_see_it(gateway: Server) -> None:
    llm, own = gateway.llm, ("0", 'my "model"')
    llm.hold()
    try:
        body = {"prompt": "x", "n": 3, "best_of": 3}
        client = gateway.open("/v1/completions", body, extra="Authorization: Bearer sesame\r\n")
        gateway.until(lambda: llm.stats.waiting + llm.stats.running == 3)
        found = samples(gateway)
        at_work = found["vllm:num_requests_waiting", *own], found["vllm:num_requests_running", *own]
        assert sum(at_work) == 3
        assert 0 <= found["vllm:kv_cache_usage_perc", *own] <= 1
    finally:
        llm.resume()
    client.close()
    gateway.until_idle()


def test_without_the_option_there_are_no_other_names(server: Server) -> None:
    assert b"vllm" not in server.get("/metrics").body
    with pytest.raises(BadRequest, match="metrics_compat"):
        ServerConfig(metrics_compat="other")  # type: ignore[arg-type]


def test_times_of_streams_are_those_of_their_writes(server: Server) -> None:
    first, between = "asyncllm_time_to_first_token_seconds", "asyncllm_inter_token_latency_seconds"

    def seen() -> list[float]:
        found = samples(server)
        return [found[f"{name}_{what}",] for name in (first, between) for what in ("count", "sum")]

    body = {"prompt": "abcdef", "max_tokens": 6}
    before = seen()
    assert server.post("/v1/completions", body).status == 200
    assert seen() == before, "only streams show their tokens one by one"
    started = time.perf_counter()
    assert server.post("/v1/completions", {**body, "stream": True}).status == 200
    took = time.perf_counter() - started
    firsts, to_first, betweens, pauses = (
        now - then for now, then in zip(seen(), before, strict=True)
    )
    assert (firsts, betweens) == (1, 5)
    assert 0 < to_first + pauses <= took


@pytest.mark.parametrize(
    ("path", "body", "cause"),
    [
        ("/v1/completions", b"{", "invalid"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, "not_found"),
        ("/v1/completions", {"prompt": "x" * 5000}, "infeasible"),
        ("/nowhere", {}, "not_found"),
    ],
)
def test_refusals_are_counted_by_cause(server: Server, path: str, body: Any, cause: str) -> None:
    name = ("asyncllm_requests_refused_total", cause)
    before = samples(server)[name]
    assert server.post(path, body).status >= 400
    assert samples(server)[name] == before + 1


def test_bytes_that_are_not_http_are_counted(server: Server) -> None:
    name = ("asyncllm_requests_refused_total", "invalid")
    before = samples(server)[name]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"GARBAGE\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.0 400 ")
    assert samples(server)[name] == before + 1


def test_a_full_queue_is_counted_by_what_is_full(server: Server) -> None:
    server.llm.hold()
    try:
        client = server.open("/v1/completions", {"prompt": "x", "n": 16, "best_of": 16})
        server.until(lambda: server.llm.stats.waiting + server.llm.stats.running == 16)
        assert server.post("/v1/completions", {"prompt": "x", "n": 16}).status == 429
        found = samples(server)
        assert found["asyncllm_requests_refused_total", "queue_requests"] == 1
        assert found["asyncllm_requests_refused_total", "queue_tokens"] == 0
        client.close()
    finally:
        server.llm.resume()
    server.until_idle()


async def test_ten_thousand_keys_make_few_series() -> None:
    keys = tuple(f"sk-raw-{i}" for i in range(10_000))
    async with (
        AsyncLLM(device="sim", max_model_len=512) as llm,
        TestClient(TestServer(create_app(llm, ServerConfig(api_key=keys)))) as client,
    ):
        body = {"prompt": "Hello", "max_tokens": 1}
        for key in keys[::200]:
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post("/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
        async with client.get("/metrics", headers=headers) as answer:
            text = await answer.text()
    counts = re.findall(r'^asyncllm_tenant_requests_total\{tenant="(.*)"\} (.*)$', text, re.M)
    assert len(counts) == MOST_LABELS + 1
    assert dict(counts)[OTHER] == f"{50 - MOST_LABELS}.0"
    assert dict(counts)[tenant_label("key-1")] == "1.0"
    assert "sk-raw" not in text
