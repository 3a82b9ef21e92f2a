"""/v1/responses as OpenAI's client uses it, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from asyncllm.config.server_config import ServerConfig
from asyncllm.text.parsing import REASONING_FORMATS, TOOL_FORMATS, Formats
from tests.support.server.fake_llm import MAX_LEN, FakeLLM, FakeTemplate
from tests.support.server.openapi import check
from tests.support.server.serving import Server, serving

RESPONSES = "/v1/responses"
FUNCTION: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
TOOLS: Any = [FUNCTION, FUNCTION | {"name": "wait"}]
CALLS = (
    "<think>Hm, é.</think>Here:"
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
)


class LastMessage(FakeTemplate):
    """What was said last is all of the prompt, so that it is what the model says."""

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.seen = (messages, options)
        text: str = messages[-1]["content"]
        return text


def make_llm() -> FakeLLM:
    llm = FakeLLM(formats=Formats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]))
    llm.chat_template = LastMessage()
    return llm


def seen(server: Server) -> tuple[Any, dict[str, Any]]:
    """The messages that the template got last, and its options."""
    assert server.llm.chat_template is not None
    return server.llm.chat_template.seen


def test_text(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="aé")
    assert (response.status, response.output_text) == ("completed", "aé")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (3, 4)
    assert response.created_at <= (response.completed_at or 0)


def test_an_answer_is_openais(server: Server) -> None:
    for fields in ({"tools": TOOLS}, {"max_output_tokens": 3}):
        answer = server.post(RESPONSES, {"input": CALLS, **fields})
        Response.model_validate_json(answer.body, strict=True)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_as_described(server: Server, document: dict[str, Any], stream: bool) -> None:
    for fields in ({"background": True}, {"max_output_tokens": 3}, {"tools": TOOLS}):
        body = {"input": CALLS, "stream": stream, **fields}
        answer = server.post(RESPONSES, body)
        check(document, "POST", RESPONSES, answer)
        made = answer.events[0]["response"] if stream else answer.json
        kept = f"{RESPONSES}/{made['id']}"
        check(document, "GET", kept, server.get(kept))
    items = server.post(RESPONSES, {"input": "a", "previous_response_id": made["id"]}).json["id"]
    page = f"{RESPONSES}/{items}/input_items"
    check(document, "GET", page, server.get(page))


def test_calls_and_reasoning(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input=CALLS, tools=TOOLS)
    reasoning, message, add, wait = response.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or ()] == ["Hm, é."]
    assert (message.type, response.output_text) == ("message", "Here:")
    assert add.type == wait.type == "function_call"
    assert (add.name, json.loads(add.arguments)) == ("add", {"a": 1})
    assert (wait.name, wait.arguments) == ("wait", "{}")
    with client.responses.stream(model="fake", input=CALLS, tools=TOOLS) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in response.output]
    assert final.output_text == "Here:"


def test_a_stream_is_numbered_and_named(server: Server) -> None:
    events = server.post(RESPONSES, {"input": "ab", "stream": True}).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]


def test_instructions_and_items(client: openai.OpenAI, server: Server) -> None:
    items: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "3"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thought"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "d", "name": "wait", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
        {
            "type": "function_call_output",
            "call_id": "d",
            "output": [{"type": "input_text", "text": "done"}],
        },
        {"role": "user", "content": "last"},
    ]
    client.responses.create(model="fake", input=items, instructions="be nice", tools=TOOLS)
    messages, options = seen(server)
    assert messages == [
        {"role": "system", "content": "be nice"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "developer", "content": "3"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "thought",
            "tool_calls": [call("c", "add", '{"a": 1}'), call("d", "wait", "{}")],
        },
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "tool", "tool_call_id": "d", "content": "done"},
        {"role": "user", "content": "last"},
    ]
    function = {key: value for key, value in FUNCTION.items() if key != "type"}
    assert options["tools"][0] == {"type": "function", "function": function}


def call(id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def test_outputs_may_be_passed_back(client: openai.OpenAI, server: Server) -> None:
    first = client.responses.create(model="fake", input=CALLS, tools=TOOLS, store=False)
    items: Any = [{"role": "user", "content": "q"}, *first.output]
    outputs = [item for item in first.output if item.type == "function_call"]
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "r"} for item in outputs
    ]
    client.responses.create(model="fake", input=items, tools=TOOLS)
    _, assistant, *results = seen(server)[0]
    assert assistant["reasoning_content"] == "Hm, é."
    assert assistant["content"] == "Here:"
    assert [each["function"]["name"] for each in assistant["tool_calls"]] == ["add", "wait"]
    assert [each["tool_call_id"] for each in results] == [item.call_id for item in outputs]


def test_tool_choice(client: openai.OpenAI, server: Server) -> None:
    client.responses.create(model="fake", input="a", tools=TOOLS, tool_choice="none")
    assert seen(server)[1]["tools"] is None
    allowed: Any = {"type": "allowed_tools", "mode": "auto"}
    allowed["tools"] = [{"type": "function", "name": "wait"}]
    response = client.responses.create(model="fake", input=CALLS, tools=TOOLS, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in seen(server)[1]["tools"]] == ["wait"]
    assert [item.name for item in response.output if item.type == "function_call"] == ["wait"]
    assert response.to_dict()["tool_choice"] == allowed
    for choice in ("required", {"type": "function", "name": "add"}):
        client.responses.create(model="fake", input="a", tools=TOOLS, tool_choice=choice)  # type: ignore[call-overload]
        assert server.llm.params[-1].grammar is not None


def test_the_form_of_the_text(client: openai.OpenAI, server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = client.responses.create(model="fake", input="{}", text={"format": form})
    assert "integer" in repr(server.llm.params[-1].grammar)
    assert response.to_dict()["text"] == {"format": form}
    client.responses.create(model="fake", input="{}", text={"format": {"type": "json_object"}})
    assert server.llm.params[-1].grammar is not None
    client.responses.create(model="fake", input="{}", text={"format": {"type": "text"}})
    assert server.llm.params[-1].grammar is None


def test_parameters(client: openai.OpenAI, server: Server) -> None:
    response = client.responses.create(
        model="fake",
        input="abcdef",
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=4,
        metadata={"k": "v"},
        reasoning={"effort": "low"},
        user="me",
        extra_body={"top_k": 7, "seed": 3},
    )
    params = server.llm.params[-1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 4)
    assert (params.top_k, params.seed) == (7, 3)
    assert seen(server)[1]["reasoning_effort"] == "low"
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.25, 4)
    assert (response.metadata, response.user) == ({"k": "v"}, "me")
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"
    assert (response.status, response.output_text) == ("incomplete", "abcd")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_what_has_no_effect_is_named(server: Server) -> None:
    body = {"input": "a", "text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}, "typo": 1}
    body["include"] = ["reasoning.encrypted_content"]
    answer = server.post(RESPONSES, body)
    assert answer.status == 200
    named = answer.headers["X-Ignored-Parameters"]
    assert named == "typo, include, text.verbosity, reasoning.summary"


def test_a_strict_server_takes_harmless_fields() -> None:
    body = {
        "input": "a",
        "user": "me",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
        "store": True,
        "metadata": {},
        "truncation": "disabled",
        "max_tool_calls": 3,
        "parallel_tool_calls": True,
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}},
        "tools": [],
        "include": [],
        "reasoning": {"effort": None},
    }
    with serving(make_llm, ServerConfig(strict=True)) as strict:
        answer = strict.post(RESPONSES, body)
        refused = strict.post(RESPONSES, body | {"text": {"typo": 1}})
    assert answer.status == 200, answer.body
    assert "X-Ignored-Parameters" not in answer.headers
    assert (refused.status, refused.json["error"]["param"]) == (400, "text.typo")


def test_logprobs() -> None:
    include = ["message.output_text.logprobs"]
    body = {"input": "aé", "include": include, "top_logprobs": 2}
    with serving() as plain:
        whole = plain.post(RESPONSES, body)
        events = plain.post(RESPONSES, body | {"stream": True}).events
    Response.model_validate_json(whole.body, strict=True)
    [part] = whole.json["output"][0]["content"]
    made = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"])
    assert made.decode() == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert events[-1]["response"]["output"][0]["content"] == [part]


def test_truncation(server: Server) -> None:
    long = "x" * (MAX_LEN // 2)
    items = [
        {"role": "system", "content": "stay"},
        {"role": "user", "content": long},
        {"role": "assistant", "content": long},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    with serving() as plain:
        refused = plain.post(RESPONSES, {"input": items})
        answer = plain.post(RESPONSES, {"input": items, "truncation": "auto"})
        messages = seen(plain)[0]
        hopeless = [items[0], {"role": "user", "content": long * 2}]
        too_long = plain.post(RESPONSES, {"input": hopeless, "truncation": "auto"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "input")
    assert answer.status == 200
    assert [message["content"] for message in messages] == ["stay", "b", "c", "d"]
    assert too_long.status == 400
    assert too_long.json["error"]["code"] == "context_length_exceeded"


def test_trace(server: Server) -> None:
    answer = server.post(RESPONSES, {"input": "ab", "trace": True})
    assert answer.json["trace"]["sequences"][0]["completion_tokens"] == 3
    events = server.post(RESPONSES, {"input": "ab", "trace": True, "stream": True}).events
    assert events[-1]["response"]["trace"]["sequences"][0]["completion_tokens"] == 3
