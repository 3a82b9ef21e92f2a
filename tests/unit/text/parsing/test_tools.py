"""Tool calls as they stream, what stands around them, and arguments of every kind."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.text.parsing import (
    End,
    Message,
    Parser,
    Reasoning,
    ToolArguments,
    ToolStart,
)
from tests.support.text.parsing_texts import (
    TEXT_NAMES,
    TOOL_NAMES,
    TOOLS,
    calls_of,
    formats_of,
    json_values,
    new_parser,
    parse_all,
    read,
    written,
)


def test_calls_stream_name_first_then_arguments_as_they_come() -> None:
    parser = new_parser(formats_of("hermes"))
    pieces = [
        "<tool_call>",
        '{"name": "no',
        'w", "arguments": ',
        '{"a"',
        ': "b',
        "c",
        '"}}',
        "</tool_call>",
    ]
    assert [parser.feed(piece) for piece in pieces] == [
        [],
        [],
        [],
        [ToolStart(0, "0", "now"), ToolArguments(0, '{"a"')],
        [ToolArguments(0, ': "b')],
        [ToolArguments(0, "c")],
        [ToolArguments(0, '"}')],
        [],
    ]
    assert parser.finish() == [End(1, open_call=False, open_reasoning=False)]


def test_text_parameters_stream_too() -> None:
    parser = new_parser(formats_of("qwen3_coder"))
    pieces = ["<function=get_weather><parameter=city>", "\nPa", 'r"', "is\n", "x\n</par", "ameter>"]
    texts = [
        "".join(event.text for event in parser.feed(piece) if isinstance(event, ToolArguments))
        for piece in pieces
    ]
    assert texts == ['{"city": ', '"Pa', 'r\\"', "is", "\\nx", '"']


def test_content_around_calls() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>\n'
    text = f"One. \n{call}\n{call}Two.\n"
    message = read("\n " + text, "hermes")
    assert (message.content, len(message.calls)) == ("\n One. \nTwo.\n", 2)
    # Whitespace before a call that comes first is not content, nor is any between calls.
    assert read("\n " + text[5:], "hermes").content == "Two.\n"


def test_a_line_that_begins_with_a_bracket_may_be_a_bare_call() -> None:
    text = 'Let me look.\n{"name": "now", "parameters": {}}'
    message = read(text, "llama3_json")
    assert (message.content, len(message.calls)) == ("Let me look.\n", 1)


def test_without_tools_markup_of_calls_is_content() -> None:
    text = written("hermes", [("now", {})])
    formats = formats_of("hermes", "think")
    assert parse_all(f"<think>a</think>{text}", formats) == Message(text, "a", [])


def test_calls_within_reasoning_are_not_made() -> None:
    call = written("hermes", [("now", {})])
    message = read(f"<think>{call}</think>{call}", "hermes", "think")
    assert (message.content, message.reasoning, len(message.calls)) == ("", call, 1)


@pytest.mark.parametrize(
    ("tools", "shape"),
    [
        ("hermes", r"call_[0-9a-f]{24}"),
        ("mistral", r"[0-9A-Za-z]{9}"),
        ("kimi_k2", r"functions\.now:[01]"),
        ("harmony", r"call_[0-9a-f]{24}"),
    ],
)
def test_ids(tools: str, shape: str) -> None:
    message = parse_all(written(tools, [("now", {}), ("now", {})]), formats_of(tools), tools=TOOLS)
    ids = [call.id for call in message.calls]
    assert all(re.fullmatch(shape, id_) for id_ in ids)
    assert ids[0] != ids[1]


@given(
    name=st.sampled_from([name for name in TOOL_NAMES if name not in TEXT_NAMES]),
    arguments=st.dictionaries(st.text(), json_values, max_size=3),
)
def test_any_arguments_come_out_as_generated(name: str, arguments: dict[str, object]) -> None:
    """Strings may hold any marker: a JSON string ends where it ends."""
    [(tool, text)] = calls_of(written(name, [("now", arguments)]), name)
    assert (tool, text) == ("now", json.dumps(arguments, ensure_ascii=False))


@given(
    name=st.sampled_from(TEXT_NAMES),
    city=st.text().filter(lambda text: "<" not in text),
    days=st.integers(),
    area=st.lists(st.integers() | st.booleans(), max_size=3),
)
def test_any_text_parameters_become_json(name: str, city: str, days: int, area: list[int]) -> None:
    arguments = {"city": city, "days": days, "area": area}
    [(tool, text)] = calls_of(written(name, [("get_weather", arguments)]), name)
    assert tool == "get_weather"
    assert text == json.dumps(arguments, ensure_ascii=False)


def test_in_reasoning_and_num_calls_tell_where_the_text_is() -> None:
    parser = Parser(formats_of("hermes", "think"), tools=TOOLS, prompt="<think>\n")
    told = [parser.in_reasoning]
    assert parser.feed("a</think>") == [Reasoning("a")]
    told.append(parser.in_reasoning)
    assert told == [True, False]
    parser.feed('<tool_call>{"name": "now", "arguments": {')
    assert parser.num_calls == 1
