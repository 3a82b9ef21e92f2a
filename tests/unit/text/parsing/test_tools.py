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
    message_of,
)
from tests.support.text.parsing_texts import (
    TAGGED_NAMES,
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
        [ToolStart(0, "0", "now"), ToolArguments(0, "{")],
        [ToolArguments(0, '"a": "b')],  # a key comes with its value
        [ToolArguments(0, "c")],
        [ToolArguments(0, '"}')],
        [],
    ]
    assert parser.finish() == [End(1, open_call=False, open_reasoning=False)]


def test_text_parameters_stream_too() -> None:
    parser = new_parser(formats_of("qwen3_coder"))
    pieces = ["<function=get_weather><parameter=city>", "\nPa", 'r"', "is\n", "x\n</par", "ameter>"]
    pieces += ["\n</function>\n</tool_call>", "\n"]  # until then more of the value may come
    texts = [
        "".join(event.text for event in parser.feed(piece) if isinstance(event, ToolArguments))
        for piece in pieces
    ]
    assert texts == ["", '{"city": "Pa', 'r\\"', "is", "\\nx", "", "", '"}']


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


@pytest.mark.parametrize("name", TAGGED_NAMES)
def test_calls_within_reasoning_are_not_made(name: str) -> None:
    call = written(name, [("now", {})])
    message = read(f"<think>{call}</think>{call}", name, "think")
    assert (message.content, message.reasoning, len(message.calls)) == ("", call, 1)
    message = read(f"<think>Hm.\n{call}</think>So", name, "think")
    assert (message.content, message.reasoning) == ("So", f"Hm.\n{call}")


@pytest.mark.parametrize("name", TAGGED_NAMES)
@pytest.mark.parametrize("end", ["", "\n", "</think>", "\n</think>\n"])
def test_calls_with_which_an_answer_ends_are_made_within_reasoning_too(name: str, end: str) -> None:
    calls = [("get_weather", {"city": "x"}), ("now", {})]
    text = written(name, calls)
    for before in ("Hm.\n", "Hm.\n\n", "<b>Hm</b> {.\n"):
        parser = new_parser(formats_of(name, "think"), prompt="<think>\n")
        events = [event for char in before + text + end for event in parser.feed(char)]
        message = message_of(events + parser.finish())
        assert (message.reasoning, message.content) == (before.rstrip(), "")
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
        assert not parser.in_reasoning
        assert parser.reasoning_end == len(before.rstrip())
    # The reasoning goes on: they are part of it.
    message = read(f"<think>Hm.\n{text}\nOr not", name, "think")
    assert (message.reasoning, message.calls) == (f"Hm.\n{text}\nOr not", [])


@pytest.mark.parametrize("name", TAGGED_NAMES)
def test_a_call_that_is_cut_off_within_reasoning_is_reasoning(name: str) -> None:
    text = "Hm.\n" + written(name, [("get_weather", {"city": "x"})])
    at = text.index("x") + 1
    parser = new_parser(formats_of(name, "think"), prompt="<think>\n")
    message = message_of(parser.feed(text[:at]) + parser.finish(cut_off=True))
    assert (message.reasoning, message.content, message.calls) == (text[:at], "", [])


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
