"""Routes around the model: what is served, how it is doing, tokens."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from asyncllm import __version__
from tests.support.server.fake_llm import BOS
from tests.support.server.serving import Server, serving


def test_small_routes(server: Server) -> None:
    assert server.get("/version").json == {"version": __version__}
    assert server.get("/ready").json == {"status": "ready"}


def test_models(server: Server) -> None:
    model = {
        "id": "fake",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "asyncllm",
        "root": "fake",
        "parent": None,
        "max_model_len": 4096,
        "vocab_size": 258,
        "quantization": None,
    }
    assert server.get("/v1/models").json == {"object": "list", "data": [model]}
    assert server.get("/v1/models/fake").json == model


def test_generate(server: Server) -> None:
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    expected = {"text": "aé", "finish_reason": "length", "stop_reason": None, "usage": usage}
    body = {"prompt": list("aé".encode()), "max_tokens": 3}
    assert server.post("/generate", body).json == expected
    frames = server.post("/generate", {**body, "stream": True}).frames
    assert frames == [{"text": "a"}, {**expected, "text": "é"}]
    with_ids = server.post("/generate", {**body, "return_token_ids": True}).json
    assert with_ids == {**expected, "token_ids": body["prompt"]}


def test_tokenize(server: Server) -> None:
    tokens = list("aé".encode())
    expected = {"count": 4, "max_model_len": 4096, "tokens": [BOS, *tokens]}
    assert server.post("/tokenize", {"prompt": "aé"}).json == expected
    body = {"prompt": "aé", "add_special_tokens": False, "return_token_strs": True}
    answer = server.post("/tokenize", body).json
    assert answer["tokens"] == tokens
    assert answer["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    assert bytes(server.post("/tokenize", chat).json["tokens"]) == b"user: a\nassistant: "
    chat["add_generation_prompt"] = False
    assert bytes(server.post("/tokenize", chat).json["tokens"]) == b"user: a\n"
    bad_bodies: list[dict[str, Any]] = [{}, {"prompt": 1}, {"messages": []}]
    for body in bad_bodies:
        assert server.post("/tokenize", body).status == 400


def test_detokenize(server: Server) -> None:
    tokens = list("aé".encode())
    assert server.post("/detokenize", {"tokens": tokens}).json == {"prompt": "aé"}
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}
    for bad in ([-1], [258], [2**70], ["a"], 1, None):
        answer = server.post("/detokenize", {"tokens": bad})
        assert answer.status == 400
        assert answer.json["error"]["param"].startswith("tokens")


def samples(server: Server) -> dict[tuple[str, ...], float]:
    """Every sample of /metrics by its name and the values of its labels."""
    answer = server.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    return {
        (sample.name.removeprefix("asyncllm_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


def test_metrics(server: Server) -> None:
    server.post("/generate", {"prompt": "abc"})
    found = samples(server)
    for gauge in ("requests_running", "requests_waiting", "kv_pages_held", "kv_pages_cached"):
        assert found[gauge,] == 0
    assert found["kv_pages_total",] == 64
    assert found["ready",] == 1
    assert found["generation_tokens_total",] >= 4
    assert found["requests_finished_total", "stop"] >= 1
    assert found["requests_finished_total", "error"] == 0
    assert found["kv_pages_pinned",] == found["pins_total",] == 0
    names = {name for name, *_ in found}
    assert "kv_pinned_pages_evicted_total" in names
    assert names >= {"prompt_tokens_total", "preemptions_total", "steps_total"}
    assert names >= {"cached_prompt_tokens_total", "kv_pages_evicted_total", "kv_host_pages_used"}
    assert names >= {"time_to_first_token_seconds_count", "inter_token_latency_seconds_count"}


def test_loop_lag_is_measured(server: Server) -> None:
    """A loop that was kept busy shows in the histogram."""

    def late() -> float:
        found = samples(server)
        lag = "event_loop_lag_seconds"
        return found[f"{lag}_count",] - found[f"{lag}_bucket", "0.1"]

    before = late()
    server.call(lambda: time.sleep(0.4))
    deadline = time.monotonic() + 3
    while late() == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_apps_have_metrics_of_their_own(server: Server) -> None:
    with serving() as other:
        other.post("/generate", {"prompt": "a"})
        assert b"asyncllm_generation_tokens_total 2.0" in other.get("/metrics").body


def test_import_needs_no_torch() -> None:
    code = "import sys, asyncllm.server.run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
