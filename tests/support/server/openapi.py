"""/openapi.json, and checks of answers against it."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema

from tests.support.server.serving import Answer

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE, RENDER = "/api/chat", "/api/generate", f"{CHAT}/render"
EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS = "/v1/embeddings", "/api/embed", "/api/embeddings"
USER = {"role": "user", "content": "aé"}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "aé"},
    GENERATE: {"prompt": "aé"},
    RESPONSES: {"input": "aé"},
    f"{RESPONSES}/compact": {"input": "aé"},
    MESSAGES: {"model": "fake", "max_tokens": 50, "messages": [USER]},
    COUNT: {"model": "fake", "messages": [USER]},
    "/tokenize": {"prompt": "aé"},
    "/detokenize": {"tokens": [97]},
    RENDER: {"messages": [USER]},
    OLLAMA_CHAT: {"model": "fake", "messages": [USER], "stream": False},
    OLLAMA_GENERATE: {"model": "fake", "prompt": "aé", "stream": False},
    "/api/show": {"model": "fake"},
    EMBEDDINGS: {"input": ["aé", "b"]},
    OLLAMA_EMBED: {"model": "fake", "input": ["aé", "b"]},
    OLLAMA_EMBEDDINGS: {"model": "fake", "prompt": "aé"},
}


def operation(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    """The one that a request belongs to."""
    path = path.partition("?")[0]
    fitting = [
        template
        for template, methods in document["paths"].items()
        if re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(template)), path)
        and method.lower() in methods
    ]
    assert fitting, f"{method} {path} is not described"
    found: dict[str, Any] = document["paths"][max(fitting, key=len)][method.lower()]
    return found


def validate(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def check(document: dict[str, Any], method: str, path: str, answer: Answer) -> None:
    """Hold an answer, and each event of a stream, against its description."""
    responses = operation(document, method, path)["responses"]
    assert str(answer.status) in responses, (path, answer.status, answer.body)
    kind = answer.headers.get_content_type()
    described = responses[str(answer.status)]
    schema = described["content"][kind]["schema"]
    if kind == "text/plain":
        return
    if kind == "text/event-stream":
        schema, values = events(schema, answer)
    elif kind == "application/x-ndjson":
        schema, values = schema["anyOf"][0], answer.lines
    else:
        values = [answer.json]
    assert values
    for value in values:
        validate(document, schema, value)
    for name in answer.headers:
        # All of our own are described; the others are HTTP's.
        if name.lower() in ("x-request-id", "x-ignored-parameters", "retry-after"):
            assert name in described["headers"]


def events(schema: dict[str, Any], answer: Answer) -> tuple[dict[str, Any], list[Any]]:
    """What each event of a stream that went well must be, and what it is."""
    data = schema["properties"]["data"]
    if "event" not in schema["properties"]:
        in_json, done = data["anyOf"]
        assert done == {"const": "[DONE]"}
        return in_json["contentSchema"]["anyOf"][0], answer.frames
    found = re.findall(r"event: (.+)\ndata: (.+)\n\n", answer.body.decode())
    values = [json.loads(text) for _, text in found]
    assert [name for name, _ in found] == [value["type"] for value in values]
    assert "".join(f"event: {e}\ndata: {d}\n\n" for e, d in found) == answer.body.decode()
    return data["contentSchema"]["anyOf"][0], values
