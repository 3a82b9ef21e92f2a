"""Predictions over HTTP: the answer is the same, and ``usage`` says what was tried of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from pytest_aiohttp import AiohttpClient

from asyncllm import AsyncLLM
from asyncllm.engine.engine import Engine
from tests.support.engine.drafting import try_all

MESSAGES = [{"role": "user", "content": "Tell me a story."}]
ASKED = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40}


@pytest.fixture
async def client(
    monkeypatch: pytest.MonkeyPatch, aiohttp_client: AiohttpClient
) -> AsyncIterator[TestClient[Any, Any]]:
    monkeypatch.setattr("asyncllm.server.metrics.server.KEPT_SECONDS", 0.0)
    async with AsyncLLM(device="cpu", cpu_threads=1, max_model_len=128) as llm:
        engine = llm._own.engine
        assert isinstance(engine, Engine)
        try_all(engine._scheduler, monkeypatch)
        yield await aiohttp_client(llm.aiohttp_app())


async def ask(client: TestClient[Any, Any], **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json={**ASKED, **fields})
    body: dict[str, Any] = await answer.json()
    assert answer.status == 200, body
    return body


async def test_an_answer_that_was_predicted(client: TestClient[Any, Any]) -> None:
    plain = await ask(client)
    text = plain["choices"][0]["message"]["content"]
    assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]
    parts = [{"type": "text", "text": part} for part in (text[:20], text[20:])]
    for prediction in (
        {"type": "content", "content": text},
        {"type": "content", "content": parts},
        text,
    ):
        found = await ask(client, prediction=prediction)
        assert found["choices"] == plain["choices"]
        details = found["usage"].pop("completion_tokens_details")
        assert details["accepted_prediction_tokens"] > 10
        assert details["accepted_prediction_tokens"] < found["usage"]["completion_tokens"]
        assert details["rejected_prediction_tokens"] < 10
    wrong = await ask(client, prediction={"type": "content", "content": "Never " * 30}, n=2)
    assert [choice["message"] for choice in wrong["choices"]] == 2 * [
        plain["choices"][0]["message"]
    ]
    details = wrong["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 0
    metrics = await (await client.get("/metrics")).text()
    for name in ("drafted_tokens", "drafted_tokens_right"):
        line = f'asyncllm_{name}_total{{kind="prediction"}} '
        value = next(line_ for line_ in metrics.splitlines() if line_.startswith(line))
        assert float(value.removeprefix(line)) > 20


async def test_streams_metrics_and_the_page_count_the_same(client: TestClient[Any, Any]) -> None:
    text = (await ask(client))["choices"][0]["message"]["content"]
    changed = {"type": "content", "content": text[:30] + "#" + text[31:]}
    whole = (await ask(client, prediction=changed))["usage"]
    before = await counts(client)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {**ASKED, **stream, "prediction": changed, "n": 2}
    answer = await client.post("/v1/chat/completions", json=asked)
    *_, last, end = (await answer.text()).strip().split("\n\n")
    assert end == "data: [DONE]"
    usage = json.loads(last.removeprefix("data: "))["usage"]
    accepted, rejected = predicted(usage)
    assert accepted > 10
    assert rejected > 0
    assert 0 < predicted(whole)[0] < accepted, "of two answers"
    after = await counts(client)
    assert [now - then for now, then in zip(after, before, strict=True)] == [
        accepted + rejected,
        accepted,
    ]
    steps = (await (await client.get("/live")).json())["steps"]
    assert [sum(step[-2] for step in steps), sum(step[-1] for step in steps)] == after


@pytest.mark.parametrize("end", [{"stop": "{cut}"}, {"stop_token_ids": "ids"}, {"max_tokens": 9}])
async def test_what_comes_after_the_end_is_not_accepted(
    client: TestClient[Any, Any], end: dict[str, Any]
) -> None:
    """Wherever a stop string, a stop token or the limit cuts a draft that is right."""
    plain = await ask(client, return_token_ids=True)
    [choice] = plain["choices"]
    text, ids = choice["message"]["content"], choice["token_ids"]
    partly = False
    for cut in range(12, 32, 3):
        given = {"stop": text[cut : cut + 3]} if "stop" in end else end
        if "stop_token_ids" in end:
            given = {"stop_token_ids": [ids[cut]]}
        found = await ask(client, prediction=text, **given)
        accepted, rejected = predicted(found["usage"])
        # The first token comes with the prompt. Then each row gives one that was not drafted.
        assert rejected == 0
        assert accepted < found["usage"]["completion_tokens"]
        partly |= accepted > 0 and found["choices"][0]["finish_reason"] == "stop"
    assert partly or "max_tokens" in end


def predicted(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


async def counts(client: TestClient[Any, Any]) -> list[int]:
    """Drafted tokens, and those that were right, in the metrics."""
    metrics = await (await client.get("/metrics")).text()
    names = [
        f'asyncllm_{name}_total{{kind="prediction"}}'
        for name in ("drafted_tokens", "drafted_tokens_right")
    ]
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[:1] != "#")
    return [int(float(values[name])) for name in names]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        (7, "prediction"),
    ],
)
async def test_what_is_no_prediction_is_refused(
    client: TestClient[Any, Any], prediction: Any, param: str
) -> None:
    answer = await client.post("/v1/chat/completions", json={**ASKED, "prediction": prediction})
    assert answer.status == 400
    error = (await answer.json())["error"]
    assert error["param"].startswith("prediction"), error
