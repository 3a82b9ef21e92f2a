"""Every real answer is what /openapi.json says, and what OpenAI's types are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai.types as openai_types
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from asyncllm.server.app import ROUTES
from asyncllm.text.parsing import REASONING_FORMATS, TOOL_FORMATS, Formats
from tests.support.server.fake_llm import FakeLLM, FakeTemplate
from tests.support.server.openapi import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATE,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    RESPONSES,
    USER,
    VALID,
    check,
    operation,
    validate,
)
from tests.support.server.serving import Server, serving

#: Requests that together make every answer look in every way it can.
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    *(("POST", path, body) for path, body in VALID.items()),
    *(
        ("POST", path, VALID[path] | fields)
        for path in (RESPONSES, MESSAGES)
        for fields in ({"stream": True}, {"top_p": 0.5, "unknown": 1})
    ),
    *(
        ("POST", path, VALID[path] | fields)
        for path in (CHAT, COMPLETIONS, GENERATE)
        for fields in (
            {"stream": True},
            {"return_token_ids": True},
            {"return_token_ids": True, "stream": True},
            {"trace": True},
            {"trace": True, "stream": True},
            {"max_tokens": 1, "unknown": 1},
            {"stop": "a"},
        )
    ),
    *(
        ("POST", path, VALID[path] | fields | {"stream": stream})
        for path in (CHAT, COMPLETIONS)
        for stream in (False, True)
        for fields in ({"prompt_logprobs": 1}, {"return_prompt_text": True})
    ),
    *(
        ("POST", path, VALID[path] | {"stream": True, "stream_options": options})
        for path in (CHAT, COMPLETIONS)
        for options in ({"include_usage": True}, {"continuous_usage_stats": True})
    ),
    *(
        ("POST", CHAT, VALID[CHAT] | fields | {"stream": stream})
        for stream in (False, True)
        for fields in ({"n": 2}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3})
    ),
    *(
        ("POST", COMPLETIONS, VALID[COMPLETIONS] | fields | {"stream": stream})
        for stream in (False, True)
        for fields in (
            {"n": 2},
            {"logprobs": 0},
            {"logprobs": 3},
            {"echo": True},
            {"echo": True, "logprobs": 2},
            {"echo": True, "logprobs": 0, "max_tokens": 0},
        )
    ),
    ("POST", COMPLETIONS, {"prompt": [[97], [98, 99]]}),
    ("POST", f"{RESPONSES}/compact", {"input": [USER, {"type": "web_search_call", "id": "w"}]}),
    ("POST", RESPONSES, {"input": [USER, {"type": "compaction_trigger"}], "stream": True}),
    ("POST", "/tokenize", {"prompt": "aé", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": [USER]}),
    *(
        ("POST", path, VALID[path] | fields | {"stream": stream})
        for stream in (False, True)
        for path in (OLLAMA_CHAT, OLLAMA_GENERATE)
        for fields in (
            {"options": {"num_predict": 1, "mirostat": 1}, "unknown": 1},
            {"logprobs": True, "top_logprobs": 2},
        )
    ),
    *(
        ("POST", EMBEDDINGS, VALID[EMBEDDINGS] | fields)
        for fields in (
            {"input": [97, 98], "encoding_format": "base64", "dimensions": 3},
            {"input": [[97], [98, 99]], "pooling": "mean", "normalize": False, "user": "me"},
            {"input": "aé", "truncate_prompt_tokens": 1, "truncation_side": "right", "typo": 1},
        )
    ),
    ("POST", OLLAMA_EMBED, {"model": "fake"}),
    ("POST", OLLAMA_EMBED, {"model": "fake", "input": "a", "dimensions": 2, "truncate": False}),
    ("POST", OLLAMA_EMBEDDINGS, {"model": "fake", "options": {"mirostat": 1}}),
    ("POST", OLLAMA_CHAT, {"model": "fake"}),
    ("POST", OLLAMA_GENERATE, {"model": "fake:latest", "keep_alive": "5m"}),
    ("POST", OLLAMA_GENERATE, {"model": "fake", "prompt": "a", "raw": True}),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("GET", "/", None),
    ("GET", "/api/version", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/fake", None),
    ("GET", "/health", None),
    ("GET", "/ping", None),
    ("GET", "/ready", None),
    ("GET", "/load", None),
    ("GET", "/metrics", None),
    ("GET", "/version", None),
    ("GET", "/live", None),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS, ids=str)
def test_answers(
    server: Server, document: dict[str, Any], method: str, path: str, body: dict[str, Any] | None
) -> None:
    answer = server.request(method, path, body)
    assert answer.status == 200, answer.body
    check(document, method, path, answer)
    if body is not None:
        schema = operation(document, method, path)["requestBody"]["content"]["application/json"]
        validate(document, schema["schema"], body)


class LastMessage(FakeTemplate):
    """What the user says last is all of the prompt, so that it is what the model says."""

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        text: str = messages[-1]["content"]
        return text


def caller() -> FakeLLM:
    llm = FakeLLM(formats=Formats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]))
    llm.chat_template = LastMessage()
    return llm


CALLS = (
    "<think>Hm, é.</think>Here:"
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "return_token_ids": True}], ids=str)
def test_calls_and_reasoning(document: dict[str, Any], fields: dict[str, Any]) -> None:
    """As described, and as OpenAI's types have them."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "wait")]
    body = {"messages": [{"role": "user", "content": CALLS}], "tools": tools, **fields}
    with serving(caller) as server:
        whole = server.post(CHAT, body)
        check(document, "POST", CHAT, whole)
        streamed = server.post(CHAT, body | {"stream": True})
        check(document, "POST", CHAT, streamed)
    message = whole.json["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm, é."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "wait"]
    assert whole.json["choices"][0]["finish_reason"] == "tool_calls"
    ChatCompletion.model_validate_json(whole.body, strict=True)
    for frame in streamed.frames:
        ChatCompletionChunk.model_validate_json(json.dumps(frame), strict=True)
    assert any("tool_calls" in frame["choices"][0]["delta"] for frame in streamed.frames)


def test_traces(server: Server, document: dict[str, Any]) -> None:
    server.post(CHAT, VALID[CHAT] | {"n": 2}, {"X-Request-Id": "traced"})
    path = "/v1/requests/traced/trace"
    check(document, "GET", path, server.get(path))


def test_aborting(server: Server, document: dict[str, Any]) -> None:
    server.call(server.llm.hold)
    held = server.open(GENERATE, VALID[GENERATE], extra="X-Request-Id: held\r\n")
    server.until(lambda: server.llm.stats.waiting == 1)
    path = "/v1/requests/held/abort"
    answer = server.post(path, b"")
    server.call(server.llm.resume)
    held.close()
    assert answer.status == 200
    check(document, "POST", path, answer)
    check(document, "POST", path, server.post(path, b""))


def test_stored_responses(server: Server, document: dict[str, Any]) -> None:
    made = server.post(RESPONSES, VALID[RESPONSES]).json["id"]
    for method, path, status in (
        ("GET", f"/v1/responses/{made}", 200),
        ("GET", f"/v1/responses/{made}/input_items", 200),
        ("POST", f"/v1/responses/{made}/cancel", 400),
        ("DELETE", f"/v1/responses/{made}", 200),
        ("DELETE", f"/v1/responses/{made}", 404),
        ("GET", f"/v1/responses/{made}/input_items", 404),
    ):
        answer = server.request(method, path)
        assert answer.status == status, (method, path)
        check(document, method, path, answer)


def test_every_route_was_tried() -> None:
    tried = {(method, path) for method, path, _ in REQUESTS}
    tried |= {
        ("GET", "/v1/models/{id:.+}"),
        ("GET", "/v1/requests/{id:.+}/trace"),
        ("POST", "/v1/requests/{id:.+}/abort"),
        ("GET", "/live/{id:.+}/trace"),  # in test_live.py
        ("POST", "/live/{id:.+}/abort"),
        ("GET", "/v1/responses/{id}"),
        ("DELETE", "/v1/responses/{id}"),
        ("POST", "/v1/responses/{id}/cancel"),
        ("GET", "/v1/responses/{id}/input_items"),
    }
    assert {(route.method, route.path) for route in ROUTES} <= tried


@pytest.mark.parametrize(
    ("path", "whole", "chunk"),
    [
        (CHAT, ChatCompletion, ChatCompletionChunk),
        (COMPLETIONS, openai_types.Completion, openai_types.Completion),
    ],
)
@pytest.mark.parametrize("logprobs", [False, True])
def test_answers_are_openais(
    server: Server,
    path: str,
    whole: type[pydantic.BaseModel],
    chunk: type[pydantic.BaseModel],
    logprobs: bool,
) -> None:
    """Their types take them, strictly: no number for a string, nothing missing."""
    scores: dict[str, Any] = {"logprobs": 2}
    if path == CHAT:
        scores = {"logprobs": True, "top_logprobs": 2}
    body = VALID[path] | {"n": 2} | (scores if logprobs else {})
    whole.model_validate_json(server.post(path, body).body, strict=True)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    frames = server.post(path, body).frames
    assert len(frames) > 3
    for frame in frames:
        for choice in frame["choices"] if path == COMPLETIONS else ():
            # The API sends null before the end, which the type of this route forgets.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        chunk.model_validate_json(json.dumps(frame), strict=True)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_that_openai_requires_is_missing(server: Server, stream: bool) -> None:
    """Python's types cannot tell: a field that must be there and may be null has a default."""
    body = VALID[CHAT] | {"logprobs": True, "top_logprobs": 1, "stream": stream}
    answer = server.post(CHAT, body)
    for whole in answer.frames if stream else [answer.json]:
        assert whole.keys() >= {"id", "object", "created", "model", "choices"}
        for choice in whole["choices"]:
            part = choice["delta"] if stream else choice["message"]
            assert part.keys() >= (set() if stream else {"role", "content", "refusal"})
            assert choice.keys() >= {"index", "finish_reason", "logprobs"}
            assert choice["logprobs"] is None or choice["logprobs"].keys() == {"content", "refusal"}
            for token in (choice["logprobs"] or {"content": ()})["content"]:
                assert token.keys() == {"token", "logprob", "bytes", "top_logprobs"}
                assert token["top_logprobs"][0].keys() == {"token", "logprob", "bytes"}


@pytest.mark.parametrize("fields", [{}, {"input": [97], "dimensions": 2}], ids=str)
def test_embeddings_are_openais(server: Server, fields: dict[str, Any]) -> None:
    answer = server.post(EMBEDDINGS, VALID[EMBEDDINGS] | fields)
    openai_types.CreateEmbeddingResponse.model_validate_json(answer.body, strict=True)


def test_models_are_openais(server: Server) -> None:
    openai_types.Model.model_validate_json(server.get("/v1/models/fake").body, strict=True)
    for model in server.get("/v1/models").json["data"]:
        openai_types.Model.model_validate_json(json.dumps(model), strict=True)
