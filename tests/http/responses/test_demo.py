"""/v1/responses of the demo model, through OpenAI's client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.server.serving import Server

MODEL = "asyncllm-demo"
SUM = "What is 27 + 45?"
STORY = "Count from 1 to 50."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["sum", "ok"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("most", [1, None])
def test_streamed_or_not_it_is_the_same(client: openai.OpenAI, most: int | None) -> None:
    fields: Any = {"model": MODEL, "input": SUM, "temperature": 0, "max_output_tokens": most}
    whole = client.responses.create(**fields)
    events = [*client.responses.create(**fields, stream=True)]
    streamed = events[-1].response
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text == streamed.output_text == "".join(pieces)
    assert whole.status == streamed.status == ("completed" if most is None else "incomplete")
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    assert client.responses.retrieve(streamed.id).to_dict() == streamed.to_dict()


def test_the_same_answer_as_chat_completions(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=SUM, temperature=0)
    messages: Any = [{"role": "user", "content": SUM}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=SUM, temperature=0)
    second = client.responses.create(
        model=MODEL, input=STORY, previous_response_id=first.id, temperature=0, max_output_tokens=9
    )
    messages: Any = [
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": STORY},
    ]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=9
    )
    assert second.output_text == chat.choices[0].message.content
    assert second.usage is not None
    assert chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens


def test_json(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}
    response = client.responses.create(model=MODEL, input=SUM, text={"format": form})
    assert response.status == "completed"
    answer = json.loads(response.output_text)
    assert (type(answer["sum"]), type(answer["ok"])) == (int, bool)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call(client: openai.OpenAI, stream: bool) -> None:
    made: Any = client.responses.create(
        model=MODEL,
        input=SUM,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        stream=stream,
    )
    response = [*made][-1].response if stream else made
    [call] = response.output
    assert (call.type, call.name) == ("function_call", "add")
    assert json.loads(call.arguments).keys() == {"sum", "ok"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "72"}
    following = client.responses.create(
        model=MODEL, input=[output], previous_response_id=response.id, max_output_tokens=5
    )
    assert following.usage is not None
    assert following.usage.output_tokens


def test_logprobs_are_of_the_text(client: openai.OpenAI) -> None:
    """The model's format of reasoning leaves them: those of the answer's text, and no others."""
    fields: Any = {
        "model": MODEL,
        "input": SUM,
        "max_output_tokens": 20,
        "temperature": 0,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    whole = client.responses.create(**fields)
    events = [*client.responses.create(**fields, stream=True)]
    [message] = whole.output
    [part] = message.content
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert events[-1].response.output[0].content == [part]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [entry.to_dict() for event in deltas for entry in event.logprobs]
    assert [entry["token"] for entry in streamed] == [entry.token for entry in part.logprobs]


def test_background(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model=MODEL, input=STORY, background=True, max_output_tokens=20, temperature=0
    )
    end = time.monotonic() + 20
    while (response := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert response.output_text
    endless = client.responses.create(
        model=MODEL, input=STORY, background=True, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(endless.id).status == "cancelled"
