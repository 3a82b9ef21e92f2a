"""Structured output and tools as clients ask for them, from the demo model."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

from tests.support.server.serving import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "asyncllm-demo"
HELLO: Any = [{"role": "user", "content": "Hello, who are you?"}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 3, "maximum": 40},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
YES_NO: dict[str, Any] = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "answer", "parameters": YES_NO}},
]
PARAMETERS = {"weather": CITY, "answer": YES_NO}


@pytest.fixture
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=HELLO, **{"max_tokens": 80, "seed": 1, **options}
    )


@pytest.mark.parametrize(
    ("seed", "form"),
    [
        (0, {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY, "strict": True}}),
        (1, {"type": "json_schema", "name": "x", "schema": CITY, "strict": True}),
        (2, {"type": "json_object", "schema": CITY}),
    ],
)
def test_a_json_schema_is_kept_to(client: openai.OpenAI, seed: int, form: Any) -> None:
    [choice] = chat(client, response_format=form, seed=seed, temperature=1.5).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), CITY)


def test_streamed_it_is_the_same(client: openai.OpenAI) -> None:
    options: Any = {"extra_body": {"structured_outputs": {"json": CITY}}, "temperature": 1.5}
    [whole] = chat(client, **options).choices
    frames = list(chat(client, stream=True, **options))
    text = "".join(frame.choices[0].delta.content or "" for frame in frames)
    assert text == whole.message.content
    assert frames[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[0-9]{3}-[ab]+c"}, r"[0-9]{3}-[ab]+c"),
        ({"guided_regex": "[0-9]{3}-[ab]+c"}, r"[0-9]{3}-[ab]+c"),
        ({"structured_outputs": {"regex": "x+"}}, r"x+"),
        ({"guided_choice": ["red", "green"]}, r"red|green"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, r"red|green"),
        ({"ebnf": 'root ::= "<" [a-z]+ ">"'}, r"<[a-z]+>"),
        ({"guided_json": {"enum": [1, "two"]}}, r'1|"two"'),
        ({"json_schema": '{"type": "boolean"}'}, r"true|false"),
    ],
)
def test_every_name_that_clients_use(client: openai.OpenAI, asked: Any, pattern: str) -> None:
    [choice] = chat(client, extra_body=asked, max_tokens=100, temperature=1.0).choices
    text = choice.message.content
    assert re.fullmatch(pattern, text) or (choice.finish_reason == "length" and text)
    answer = client.completions.create(model=MODEL, prompt="Hi", max_tokens=100, extra_body=asked)
    assert re.fullmatch(pattern, answer.choices[0].text) or (
        answer.choices[0].finish_reason == "length"
    )


def test_several_choices_each_keep_to_it(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": YES_NO}}
    for choice in chat(client, response_format=form, n=4, seed=None).choices:
        jsonschema.validate(json.loads(choice.message.content), YES_NO)


def test_what_cannot_be_is_refused_by_its_name(client: openai.OpenAI) -> None:
    refused = [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_json": {"type": "frob"}}, "guided_json"),
        ({"regex": "(unclosed"}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool"),
    ]
    for asked, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, extra_body=asked)
        assert (caught.value.param or "").startswith(param), asked


def test_schemas_that_no_grammar_can_enforce_are_named(client: openai.OpenAI) -> None:
    """Of tools that are not strict: a call must be made, and its arguments are some object."""
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}}
    tools: Any = [TOOLS[0], {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "odd"}}]
    for choice in choices:
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, tools=tools, tool_choice=choice, max_tokens=200, seed=1
        )
        assert answer.headers["X-Ignored-Parameters"] == "tools.odd.parameters"
        for call in answer.parse().choices[0].message.tool_calls or ():
            assert call.type == "function"
            assert isinstance(json.loads(call.function.arguments), dict)
    tools[1]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match=r"odd.*look-behind"):
        chat(client, tools=tools, tool_choice="required")
    plain = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="required", max_tokens=200
    )
    assert "X-Ignored-Parameters" not in plain.headers


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_made(client: openai.OpenAI, seed: int) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": "required", "temperature": 1.5, "seed": seed}
    options["parallel_tool_calls"] = False
    [choice] = chat(client, max_tokens=200, **options).choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
    assert choice.message.content is None


def test_a_forced_call_that_is_cut_short_is_no_content(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    options: Any = {"tools": TOOLS, "tool_choice": named, "temperature": 0}
    for most in (1, 2, 3, 5, 8, 12, 16):
        [choice] = chat(client, max_tokens=most, **options).choices
        assert choice.finish_reason == "length"
        assert not choice.message.content


def test_stop_strings_do_not_end_a_forced_call(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    options: Any = {"tools": TOOLS, "tool_choice": named, "stop": ["{", ":", '"', "arg"]}
    [choice] = chat(client, temperature=1.0, seed=1, **options).choices
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), CITY)


def test_a_named_call_is_made_and_streams(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    options: Any = {"tools": TOOLS, "tool_choice": named, "temperature": 1.0}
    [whole] = chat(client, **options).choices
    [call] = whole.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    name, arguments, finish = "", "", None
    for frame in chat(client, stream=True, **options):
        for part in frame.choices[0].delta.tool_calls or ():
            name += part.function.name or ""
            arguments += part.function.arguments or ""
        finish = frame.choices[0].finish_reason or finish
    assert (name, arguments, finish) == ("weather", call.function.arguments, "tool_calls")


@pytest.mark.parametrize("seed", range(3))
def test_an_allowed_tool_is_called(client: openai.OpenAI, seed: int) -> None:
    one = {"type": "function", "function": {"name": "weather"}}
    allowed = {"mode": "required", "tools": [one]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    options: Any = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.5, "seed": seed}
    [answer] = chat(client, parallel_tool_calls=False, **options).choices
    assert [call.function.name for call in answer.message.tool_calls] == ["weather"]


def test_without_a_choice_the_text_is_free(client: openai.OpenAI) -> None:
    with_tools = chat(client, tools=TOOLS, temperature=0)
    assert with_tools.choices[0].finish_reason == "stop"
    assert with_tools.choices[0].message.content
    none = chat(client, tools=TOOLS, tool_choice="none", temperature=0)
    assert none.choices[0].message.tool_calls is None
