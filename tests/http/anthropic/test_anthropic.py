"""/v1/messages as Anthropic's client uses it, over real sockets."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import msgspec
import pytest

from asyncllm.config.server_config import ServerConfig
from tests.http.responses.test_responses import CALLS, make_llm, seen
from tests.support.server.fake_llm import MAX_LEN
from tests.support.server.openapi import check
from tests.support.server.serving import Server, serving

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS: Any = [ADD, ADD | {"name": "wait"}]
SAID: Any = [{"role": "user", "content": CALLS}]
HI: Any = [{"role": "user", "content": "hi"}]
EPHEMERAL: Any = {"type": "ephemeral"}


def marked(mark: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": mark}]}]


def test_text(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="fake", max_tokens=10, messages=HI)
    assert [block.type for block in message.content] == ["text"]
    assert (message.role, message.stop_reason) == ("assistant", "end_turn")
    assert message.content[0].text == "hi"  # type: ignore[union-attr]
    assert (message.usage.input_tokens, message.usage.output_tokens) == (2, 3)
    assert message._request_id


def test_calls_and_thinking(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": "fake", "max_tokens": 999, "messages": SAID, "tools": TOOLS}
    whole: Any = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed: Any = stream.get_final_message()
    for message in (whole, streamed):
        thinking, text, add, wait = message.content
        assert thinking.type == "thinking"
        assert (thinking.thinking, bool(thinking.signature)) == ("Hm, é.", True)
        assert (text.type, getattr(text, "text", None)) == ("text", "Here:")
        assert add.type == wait.type == "tool_use"
        assert (add.name, add.input, wait.name, wait.input) == ("add", {"a": 1}, "wait", {})
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_as_described(server: Server, document: dict[str, Any], stream: bool) -> None:
    for fields in ({"tools": TOOLS}, {"max_tokens": 3}, {"stop_sequences": ["m"]}):
        body = {"messages": SAID, "max_tokens": 999, "stream": stream, **fields}
        check(document, "POST", MESSAGES, server.post(MESSAGES, body))


def test_events(server: Server) -> None:
    body = {"messages": HI, "max_tokens": 9, "stream": True}
    events = server.post(MESSAGES, body).events
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start"),
        *("content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["content"] == []
    assert events[-2]["usage"]["output_tokens"] == 3


def test_answers_may_be_passed_back(client: anthropic.Anthropic, server: Server) -> None:
    first = client.messages.create(model="fake", max_tokens=999, messages=SAID, tools=TOOLS)
    add, wait = (block.id for block in first.content if block.type == "tool_use")
    results: Any = [
        {"type": "tool_result", "tool_use_id": add, "content": "7"},
        {
            "type": "tool_result",
            "tool_use_id": wait,
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "is_error": True,
        },
        {"type": "text", "text": "and now?"},
    ]
    messages: Any = [*HI, first.to_param(), {"role": "user", "content": results}]
    system: Any = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    system.append({"type": "text", "text": "nice"})
    client.messages.create(
        model="fake", max_tokens=9, messages=messages, tools=TOOLS, system=system
    )
    given, options = seen(server)
    assert [message["role"] for message in given] == [
        *("system", "user", "assistant", "tool", "tool", "user")
    ]
    assert given[0]["content"] == "be\nnice"
    assert (given[2]["content"], given[2]["reasoning_content"]) == ("Here:", "Hm, é.")
    calls = given[2]["tool_calls"]
    assert [call["id"] for call in calls] == [add, wait]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}
    assert given[3] == {"role": "tool", "tool_call_id": add, "content": "7"}
    assert given[4] == {"role": "tool", "tool_call_id": wait, "content": "a\nb"}
    assert given[5] == {"role": "user", "content": "and now?"}
    assert options["tools"][0] == {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]},
    }


def test_turns_of_one_side_are_joined(client: anthropic.Anthropic, server: Server) -> None:
    block: Any = [{"type": "text", "text": "c"}]
    messages: Any = [*HI, {"role": "user", "content": "b"}, {"role": "user", "content": block}]
    client.messages.create(model="fake", max_tokens=9, messages=messages)
    assert seen(server)[0] == [{"role": "user", "content": "hi\nb\nc"}]


def test_a_prefilled_answer_is_continued(client: anthropic.Anthropic, server: Server) -> None:
    messages: Any = [*HI, {"role": "assistant", "content": "so"}]
    client.messages.create(model="fake", max_tokens=9, messages=messages)
    options = seen(server)[1]
    assert options["continue_final_message"]
    assert not options["add_generation_prompt"]


def test_parameters(client: anthropic.Anthropic, server: Server) -> None:
    client.messages.create(
        model="fake",
        max_tokens=9,
        messages=HI,
        stop_sequences=["x", "yz"],
        metadata={"user_id": "u"},
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 5},
    )
    params = server.llm.params[-1]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
    assert (params.max_tokens, params.stop, params.seed) == (9, ("x", "yz"), 5)


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="fake", max_tokens=9, messages=HI, stop_sequences=["i", "q"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "i")
    assert message.content[0].text == "h"  # type: ignore[union-attr]
    cut = client.messages.create(model="fake", max_tokens=1, messages=HI)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_tool_choice(client: anthropic.Anthropic, server: Server) -> None:
    def ask(choice: Any) -> Any:
        client.messages.create(
            model="fake", max_tokens=9, messages=HI, tools=TOOLS, tool_choice=choice
        )
        return server.llm.params[-1].grammar

    assert ask({"type": "auto"}) is None
    assert ask({"type": "none"}) is None
    assert seen(server)[1]["tools"] is None
    assert ask({"type": "any"}) is not None
    assert "wait" not in repr(ask({"type": "tool", "name": "add"}))
    assert ask({"type": "auto", "disable_parallel_tool_use": True}) is not None


def test_thinking(
    client: anthropic.Anthropic, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.llm.chat_reader, "reasoning_ends", frozenset((7,)))

    def ask(**fields: Any) -> dict[str, Any]:
        client.messages.create(model="fake", max_tokens=9, messages=HI, **fields)
        return seen(server)[1]

    assert "enable_thinking" not in ask()
    assert "enable_thinking" not in ask(thinking={"type": "adaptive"})
    assert ask(thinking={"type": "disabled"})["enable_thinking"] is False
    assert ask(thinking={"type": "enabled", "budget_tokens": 1024})["enable_thinking"] is True
    reasoning = server.llm.params[-1].reasoning
    assert reasoning is not None
    assert reasoning.max_tokens == 1024
    assert ask(output_config={"effort": "low"})["reasoning_effort"] == "low"


def test_the_form_of_the_text(client: anthropic.Anthropic, server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        body = {"model": "fake", "max_tokens": 9, "messages": HI, **fields}
        client.post("/v1/messages", body=body, cast_to=object)
        assert "integer" in repr(server.llm.params.pop().grammar)


def test_counting(client: anthropic.Anthropic, server: Server) -> None:
    counted = client.messages.count_tokens(model="fake", messages=SAID, system="s", tools=TOOLS)
    message = client.messages.create(
        model="fake", max_tokens=1, messages=SAID, system="s", tools=TOOLS
    )
    assert counted.input_tokens == message.usage.input_tokens
    long: Any = [{"role": "user", "content": "a" * 2 * MAX_LEN}]
    assert client.messages.count_tokens(model="fake", messages=long).input_tokens == 2 * MAX_LEN


def test_what_has_no_effect_is_named(server: Server) -> None:
    thinking = {"type": "adaptive", "display": "summarized"}
    body = {"messages": HI, "max_tokens": 9, "thinking": thinking, "typo": 1}
    body["context_management"] = {"edits": [{"type": "clear_thinking_20251015"}]}
    ignored = server.post(MESSAGES, body).headers["X-Ignored-Parameters"]
    assert ignored == "typo, thinking.display, context_management"


def test_a_strict_server_takes_harmless_fields() -> None:
    cached = {"type": "ephemeral", "ttl": "5m"}
    said = [{"type": "text", "text": "hi", "cache_control": cached}]
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": said}],
        "max_tokens": 9,
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "speed": "standard",
        "inference_geo": "eu",
        "cache_control": cached,
        "tools": [ADD | {"type": "custom", "cache_control": cached}],
        "system": said,
    }
    with serving(make_llm, ServerConfig(strict=True)) as strict:
        answer = strict.post(f"{MESSAGES}?beta=true", body, {"anthropic-version": "2023-06-01"})
        refused = strict.post(MESSAGES, body | {"typo": 1})
    assert answer.status == 200, answer.body
    assert "X-Ignored-Parameters" not in answer.headers
    assert (refused.status, refused.json["type"]) == (400, "error")


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        ({"cache_control": EPHEMERAL}, 300),
        ({"cache_control": EPHEMERAL | {"ttl": "1h"}}, 3600),
        ({"system": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}]}, 300),
        ({"tools": [ADD | {"cache_control": EPHEMERAL}], "system": "a"}, 300),
        ({"messages": marked(EPHEMERAL)}, 300),
        ({"messages": marked(EPHEMERAL), "cache_control": EPHEMERAL | {"ttl": "1h"}}, 3600),
        ({"messages": [*HI, *marked(None)]}, None),
        ({"messages": marked(EPHEMERAL), "cache_ttl_s": 7}, 7),
        ({"messages": marked(EPHEMERAL), "cache_ttl_s": 0}, 0),
    ],
    ids=str,
)
def test_cache_control_pins(server: Server, fields: dict[str, Any], seconds: float | None) -> None:
    answer = server.post(MESSAGES, {"messages": HI, "max_tokens": 9} | fields)
    assert answer.status == 200, answer.body
    assert server.llm.scheduling[-1].cache_ttl_s == seconds


def test_cache_control_in_the_result_of_a_tool_pins(server: Server) -> None:
    text = {"type": "text", "text": "7", "cache_control": EPHEMERAL}
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text]}
    messages = [
        *HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = server.post(MESSAGES, {"messages": messages, "max_tokens": 9, "tools": [ADD]})
    assert answer.status == 200, answer.body
    assert server.llm.scheduling[-1].cache_ttl_s == 300


@pytest.mark.parametrize("mark", [{"type": "for ever"}, EPHEMERAL | {"ttl": "2h"}], ids=str)
def test_bad_cache_control_is_refused(server: Server, mark: dict[str, Any]) -> None:
    for fields in ({"cache_control": mark}, {"messages": marked(mark)}):
        answer = server.post(MESSAGES, {"messages": HI, "max_tokens": 9} | fields)
        assert answer.status == 400
        assert "cache_control" in answer.json["error"]["message"]


def test_a_server_with_a_lower_limit_pins_for_as_long_as_it_allows() -> None:
    with serving(make_llm) as server:
        lower = msgspec.structs.replace(server.llm.limits, max_cache_ttl=60.0)
        server.call(lambda: setattr(server.llm, "limits", lower))
        assert server.post(MESSAGES, {"messages": marked(EPHEMERAL), "max_tokens": 9}).status == 200
        assert server.llm.scheduling[-1].cache_ttl_s == 60


def test_usage_tells_what_was_put_into_the_cache(server: Server) -> None:
    """The pages of the prompt that were not there yet; the rest is input."""
    page = server.llm.limits.page_size
    long = "a" * (3 * page + 1)
    body = {"messages": [{"role": "user", "content": long}], "max_tokens": 9}

    def usage(**fields: Any) -> tuple[int, int, int]:
        used = server.post(MESSAGES, body | fields).json["usage"]
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        found = tuple(used[name] for name in names)
        assert sum(found) == len(long)
        return found

    assert usage() == (3 * page + 1, 0, 0)
    assert usage(cache_control=EPHEMERAL) == (1, 3 * page, 0)
    server.call(lambda: setattr(server.llm, "cached", page))
    assert usage(cache_control=EPHEMERAL) == (1, 2 * page, page)
    assert usage() == (2 * page + 1, 0, page)
    server.call(lambda: setattr(server.llm, "cached", 0))


def test_trace(server: Server) -> None:
    body = {"messages": HI, "max_tokens": 9, "trace": True}
    answer = server.post(MESSAGES, body)
    assert answer.json["trace"]["sequences"][0]["completion_tokens"] == 3
    events = server.post(MESSAGES, body | {"stream": True}).events
    assert events[-2]["trace"]["sequences"][0]["completion_tokens"] == 3
