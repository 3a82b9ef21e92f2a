"""Ollama's own client and the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import ollama
import pytest
import requests

from tests.support.server.serving import Server

MODEL = "asyncllm-demo"
SUM = [{"role": "user", "content": "What is 27 + 45?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "name": {"enum": ["Ann", "Bob"]}},
    "required": ["age", "name"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Get the weather.

    Args:
        city: the city
    """
    return f"Sunny in {city}, 21 degrees."


@pytest.fixture
def client(demo: Server) -> Iterator[ollama.Client]:
    with ollama.Client(demo.url) as made:
        yield made


def test_chat(client: ollama.Client) -> None:
    answer = client.chat(MODEL, SUM, options={"temperature": 0})
    assert "72" in (answer.message.content or "")
    assert answer.done_reason == "stop"
    parts = list(client.chat(f"{MODEL}:latest", SUM, stream=True, options={"temperature": 0}))
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    last = parts[-1]
    assert last.eval_count == answer.eval_count
    assert last.total_duration is not None
    spent = [last.load_duration, last.prompt_eval_duration, last.eval_duration]
    assert None not in spent
    assert sum(filter(None, spent)) == last.total_duration
    assert (last.prompt_eval_duration or 0) > 0
    assert (last.eval_duration or 0) > 0


def test_generate(client: ollama.Client) -> None:
    chat = client.chat(MODEL, SUM).message.content
    assert client.generate(MODEL, SUM[0]["content"]).response == chat
    short = client.generate(MODEL, "Count from 1 to 50.", options={"num_predict": 5})
    assert (short.done_reason, short.eval_count) == ("length", 5)
    raw = "<|im_start|>user\nWhat is 27 + 45?<|im_end|>\n<|im_start|>assistant\n"
    assert client.generate(MODEL, raw, raw=True).response == chat


@pytest.mark.parametrize("stream", [False, True])
def test_json(client: ollama.Client, stream: Any) -> None:
    options = {"num_predict": 200}
    answer: Any = client.chat(MODEL, SUM, format=SCHEMA, options=options, stream=stream)
    parts = list(answer) if stream else [answer]
    text = "".join(part.message.content or "" for part in parts)
    jsonschema.validate(json.loads(text), SCHEMA)
    free = client.generate(MODEL, "A person as JSON.", format="json", options=options)
    if free.done_reason == "stop":
        assert isinstance(json.loads(free.response or ""), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_is_a_function(client: ollama.Client, stream: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer: Any = client.chat(MODEL, messages, tools=[get_weather], stream=stream)
    parts = list(answer) if stream else [answer]
    [call] = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    result = get_weather(**call.function.arguments)
    messages += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_name": "get_weather"},
    ]
    end = client.chat(MODEL, messages, tools=[get_weather])
    assert end.done_reason == "stop"
    assert end.message.content
    assert not end.message.tool_calls


def test_models(client: ollama.Client) -> None:
    [model] = client.list().models
    [running] = client.ps().models
    assert model.model == running.model == MODEL
    assert model.details is not None
    assert (model.details.family, model.details.quantization_level) == ("qwen3", "float32")
    shown = client.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo["qwen3.context_length"] == running.context_length == 2048
    assert "tools" in (shown.capabilities or ())


def test_a_bad_schema(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(MODEL, SUM, format={"type": "nonsense"})
    assert caught.value.status_code == 400


def test_a_rendered_prompt(demo: Server) -> None:
    body: dict[str, Any] = {"messages": SUM}
    rendered = requests.post(f"{demo.url}/v1/chat/completions/render", json=body, timeout=10).json()
    counted = requests.post(f"{demo.url}/tokenize", json=body, timeout=10).json()
    assert rendered["token_ids"] == counted["tokens"]
    assert rendered["count"] == counted["count"]
    assert rendered["prompt"].startswith("<|im_start|>user\nWhat is 27 + 45?<|im_end|>")
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    refused = requests.post(
        f"{demo.url}/v1/chat/completions/render", json=body | {"response_format": form}, timeout=10
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"
