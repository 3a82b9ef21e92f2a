"""/v1/messages of the demo model, through Anthropic's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.server.serving import Server

MODEL = "asyncllm-demo"
SUM: Any = [{"role": "user", "content": "What is 27 + 45?"}]
STORY: Any = [{"role": "user", "content": "Count from 1 to 50."}]
TOOL: Any = {
    "name": "add",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.url, api_key="unused", max_retries=0) as made:
        yield made


def test_streamed_or_not_it_is_the_same(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 30, "messages": STORY, "extra_body": GREEDY}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert whole.content
    assert [block.to_dict() for block in whole.content] == [
        block.to_dict() for block in streamed.content
    ]
    assert whole.stop_reason == streamed.stop_reason
    assert whole.usage.output_tokens == streamed.usage.output_tokens


def test_counting(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=SUM)
    usage = client.messages.create(model=MODEL, max_tokens=9, messages=SUM).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_prefilled_answer(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": MODEL, "extra_body": GREEDY}
    whole = client.messages.create(messages=SUM, max_tokens=12, **fields).content[0].text
    begun = whole[: len(whole) // 2].rstrip()
    messages: Any = [*SUM, {"role": "assistant", "content": begun}]
    rest = client.messages.create(messages=messages, max_tokens=12, **fields).content[0].text
    assert (begun + rest).startswith(whole[: len(begun) + 1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call(client: anthropic.Anthropic, stream: bool) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 200, "messages": SUM, "tools": [TOOL]}
    fields["tool_choice"] = {"type": "tool", "name": "add"}
    if stream:
        with client.messages.stream(**fields) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(**fields)
    [call] = message.content
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "add")
    assert {type(value) for value in call.input.values()} == {int}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "72"}
    following: Any = [*SUM, message.to_param(), {"role": "user", "content": [result]}]
    fields |= {"messages": following, "tool_choice": {"type": "none"}, "max_tokens": 5}
    assert client.messages.create(**fields).usage.output_tokens
