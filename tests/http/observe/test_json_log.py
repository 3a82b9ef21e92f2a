"""``--log-format json``: one object for each record, whatever is logged."""

from __future__ import annotations

import io
import json
import logging
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.stats import EngineStats
from asyncllm.engine.tenants import tenant_label
from asyncllm.server.http.middleware import request_id, request_tenant
from asyncllm.server.observe.log_format import current_request
from asyncllm.server.throughput_log import Throughput
from asyncllm.system.json_log import JsonFormatter, fields
from tests.support.server.serving import Server, ServerProcess, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = {"Authorization": "Bearer sesame", "X-Request-Id": "mine"}


class Log:
    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(JsonFormatter(current_request))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    made, logger = Log(), logging.getLogger("asyncllm")
    level = logger.level
    logger.addHandler(made.handler)
    logger.setLevel("INFO")
    yield made
    logger.removeHandler(made.handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = ServerConfig(log_requests=True, api_key=("open", "sesame"), served_model_name=("m",))
    with serving(config=config) as running:
        yield running


def test_a_request(server: Server, log: Log) -> None:
    body = {"prompt": "whisper", "max_tokens": 3}
    assert server.post("/v1/completions", body, KEY).status == 200
    server.until(lambda: bool(log.lines))
    [line] = log.lines
    at = datetime.fromisoformat(line.pop("time"))
    assert at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert line.pop("ttft_ms") > 0
    assert line.pop("total_ms") > 0
    assert line == {
        "level": "info",
        "logger": "asyncllm.server.observe.access_log",
        "message": "request",
        "request_id": "mine",
        "tenant": tenant_label("key-2"),
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "model": "m",
        "prompt": 8,
        "cached": 0,
        "output": 3,
        "finish": "length",
    }


def test_a_refusal_and_whose_it_was_not(server: Server, log: Log) -> None:
    assert server.post("/v1/completions", {"prompt": "x", "n": 0}, KEY).status == 400
    assert server.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "b"}).status == 401
    server.until(lambda: len(log.lines) == 2)
    refused, unknown = log.lines
    assert (refused["error"], refused["param"]) == ("invalid_request_error", "n")
    assert (unknown["request_id"], unknown["tenant"], unknown["code"]) == (
        "b",
        "none",
        "invalid_api_key",
    )
    assert "model" not in unknown, "what is not known is left out"


def record(message: str, *args: object, **more: Any) -> dict[str, Any]:
    made = logging.LogRecord("asyncllm.x", logging.ERROR, __file__, 1, message, args, None)
    vars(made).update(more)
    text = JsonFormatter(current_request).format(made)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_exceptions_are_inside_the_object() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        line = record("request %s failed", 7, exc_info=sys.exc_info())
    assert line["message"] == "request 7 failed"
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: first\nsecond")


def test_whatever_a_message_holds() -> None:
    assert record('start\n"up" \ud800')["message"] == 'start\n"up" ?'
    assert "request_id" not in record("at the start")
    name, tenant = request_id.set("r-1"), request_tenant.set("key-9")
    try:
        line = record("in a request")
    finally:
        request_id.reset(name)
        request_tenant.reset(tenant)
    assert (line["request_id"], line["tenant"]) == ("r-1", tenant_label("key-9"))
    assert "key-9" not in str(line)


def test_throughput_has_numbers() -> None:
    stats = EngineStats(pages_total=200)
    throughput = Throughput(stats, 100.0)
    stats.running, stats.pages_held, stats.generation_tokens = 3, 50, 500
    found = throughput.line(110.0)
    assert found is not None
    line = record("%s", found[0], **fields("throughput", found[1]))
    assert line["message"] == "throughput"
    assert (line["running"], line["generated_tokens_per_s"], line["kv_cache_used"]) == (3, 50, 0.25)
    assert "prefix_hits" not in line, "nothing was looked up"


def test_all_that_a_server_logs(tmp_path: Any) -> None:
    path = tmp_path / "log"
    with path.open("w") as stderr:
        options = ("--device", "sim", "--log-format", "json", "--log-requests")
        server = ServerProcess(*options, log=stderr)
        server.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(line["message"].startswith("start-up:\n") for line in lines)
    assert all(line["time"].endswith("Z") and line["logger"] for line in lines)
