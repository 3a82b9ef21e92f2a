"""Text comes out as early as it can, and a long text costs what its length costs."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from time import process_time
from types import FrameType

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncllm.text.parsing import Content, Formats, Reasoning, ToolArguments
from tests.support.text.parsing_texts import (
    TAGGED_NAMES,
    TEXT_NAMES,
    TOOL_NAMES,
    formats_of,
    new_parser,
    written,
)

ALL = [formats_of(name, "think") for name in TAGGED_NAMES] + [
    formats_of("harmony"),
    formats_of("hermes", "granite"),
    formats_of(None, "think"),
    Formats(),
]


@given(
    formats=st.sampled_from(ALL),
    first=st.sampled_from("axé🙂5"),
    words=st.lists(st.text("ab é🙂.,;:'\"()5\\}]=\n", min_size=1, max_size=6), max_size=10),
)
def test_plain_text_is_never_held_back(formats: Formats, first: str, words: list[str]) -> None:
    words = [word.replace(" to=", " to ") for word in words]
    parser = new_parser(formats)
    assert parser.feed(first) == [Content(first)]
    for word in words:
        assert parser.feed(word) == [Content(word)]


@pytest.mark.parametrize("formats", ALL)
def test_plain_text_takes_two_python_calls(formats: Formats) -> None:
    parser = new_parser(formats)
    parser.feed("Hello")
    called: list[str] = []

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    gc.disable()  # a collection would call those that watch it
    sys.setprofile(on_event)
    events = parser.feed(" there")
    sys.setprofile(None)
    gc.enable()
    assert events == [Content(" there")]
    assert len(called) <= 2, called


@given(
    formats=st.sampled_from(ALL[:-1]), words=st.lists(st.text("ab \n", max_size=4)), data=st.data()
)
def test_only_the_beginning_of_a_marker_is_held_back(
    formats: Formats, words: list[str], data: st.DataObject
) -> None:
    markers = sorted(formats.markers())
    beginnings = [marker[:end] for marker in markers for end in range(len(marker))]
    text = "x" + "".join(word + data.draw(st.sampled_from(beginnings)) for word in words)
    assume(not any(marker in text for marker in markers))
    parser = new_parser(formats)
    shown = ""
    for end, char in enumerate(text, start=1):
        for event in parser.feed(char):
            assert isinstance(event, Content)
            shown += event.text
        held = text[len(shown) : end]
        assert text.startswith(shown)
        assert any(beginning.startswith(held) for beginning in beginnings)
    shown += "".join(e.text for e in parser.finish() if isinstance(e, Content))
    assert shown == text


def test_reasoning_and_arguments_are_not_held_back_either() -> None:
    parser = new_parser(formats_of("hermes", "think"), prompt="<think>")
    for char in "Let me see. {[(1 + 2)]}":
        assert parser.feed(char) == [Reasoning(char)]
    # A key, a comma and a number wait for what follows; then a string comes as it is written.
    parser.feed('</think><tool_call>{"name": "now", "arguments": {"a": [')
    assert parser.feed('-1.5, "') == [ToolArguments(0, '-1.5, "')]
    for char in "Let me see. {[(1 + 2)]}":
        assert parser.feed(char) == [ToolArguments(0, char)]
    assert parser.feed('", nul') == [ToolArguments(0, '"')]
    assert parser.feed('l], "b": ') == [ToolArguments(0, ", null]")]


@pytest.mark.parametrize(
    ("name", "text"),
    [("mistral", "[TOOL_CALLS]" + "a" * 300), ("harmony", "<|channel|>" + "a" * 600)],
)
def test_names_and_headers_have_a_length(name: str, text: str) -> None:
    parser = new_parser(formats_of(name))
    assert any(parser.feed(char) for char in text)


N = 500_000
CALL = written("hermes", [("get_weather", {"city": "Paris, France", "days": 3})])

# Texts of a length, in the ways in which a parser can be made to wait or to start over.
LONG: dict[str, tuple[Formats, Callable[[int], str]]] = {
    "content": (formats_of("hermes", "think"), lambda n: "word <b>and</b> " * (n // 16)),
    "lines": (formats_of("llama3_json"), lambda n: '{"a"\n' * (n // 5)),
    "spaces": (formats_of("hermes", "think"), lambda n: " " * n),
    "reasoning": (formats_of("hermes", "think"), lambda n: "<think>" + "a </thin" * (n // 8)),
    "calls": (formats_of("hermes"), lambda n: CALL * (n // len(CALL))),
    "not calls": (formats_of("hermes"), lambda n: '<tool_call>{"name": "no' * (n // 23)),
    "bad names": (formats_of("mistral"), lambda n: "[TOOL_CALLS]" * (n // 12)),
    "a name": (formats_of("mistral"), lambda n: "[TOOL_CALLS]" + "a" * n),
    "a key": (formats_of("hermes"), lambda n: '<tool_call>{"' + "a" * n),
    "an argument": (
        formats_of("hermes"),
        lambda n: '<tool_call>{"name": "now", "arguments": {"a": "' + "b\\n" * (n // 3),
    ),
    "a number": (formats_of("mistral"), lambda n: "[TOOL_CALLS]now[ARGS][" + "5" * n),
    "brackets": (formats_of("mistral"), lambda n: "[TOOL_CALLS]now[ARGS]" + '[{"":' * (n // 5)),
    "not JSON": (
        formats_of("mistral"),
        lambda n: "[TOOL_CALLS]now[ARGS]{" + "[TOOL_CALL" * (n // 10),
    ),
    "arguments before the name": (
        formats_of("hermes"),
        lambda n: '<tool_call>{"arguments": [' + "1," * (n // 2) + '1], "name": "now"}',
    ),
    "arguments as a string": (
        formats_of("hermes"),
        lambda n: '<tool_call>{"name": "now", "arguments": "' + '\\"\\u00e9' * (n // 8),
    ),
    "a parameter": (
        formats_of("qwen3_coder"),
        lambda n: "<function=get_weather><parameter=city>" + "a\n</param" * (n // 10),
    ),
    "a typed parameter": (
        formats_of("qwen3_coder"),
        lambda n: "<function=get_weather><parameter=area>[" + "1," * (n // 2),
    ),
    "parameters": (
        formats_of("qwen3_coder"),
        lambda n: "<function=now>" + "<parameter=a>\n1\n</parameter>\n" * (n // 29),
    ),
    "calls in reasoning": (
        formats_of("hermes", "think"),
        lambda n: "<think>" + CALL * (n // len(CALL)),
    ),
    "calls and words in reasoning": (
        formats_of("hermes", "think"),
        lambda n: "<think>" + (CALL + "x") * (n // len(CALL)),
    ),
    "half calls in reasoning": (
        formats_of("hermes", "think"),
        lambda n: "<think>" + '<tool_call>{"name": "now", "arguments": {"a": "' * (n // 47),
    ),
    "strings without end": (
        formats_of("hermes"),
        lambda n: '<tool_call>{"name": "now", "arguments": {"a": "b}}</tool_call>' * (n // 61),
    ),
    "a string without end": (
        formats_of("hermes"),
        lambda n: '<tool_call>{"name": "now", "arguments": {"a": "' + "b</tool_call>" * (n // 13),
    ),
    "tools not offered": (
        formats_of("granite"),
        lambda n: "[" + '{"name": "no", "arguments": {}},' * (n // 32),
    ),
    "brackets in content": (formats_of("pythonic"), lambda n: "[now(" + "[{" * (n // 2)),
    "words": (formats_of("olmo3"), lambda n: "<function_calls>now(a=b " + "c (" * (n // 3)),
    "parentheses": (formats_of("olmo3"), lambda n: "<function_calls>now(a=" + "(" * n),
    "parameters without end": (
        formats_of("glm45"),
        lambda n: "<tool_call>now<arg_key>a</arg_key><arg_value>" + "</tool_call>b" * (n // 13),
    ),
    "names": (formats_of("glm4"), lambda n: "now\n" * (n // 4)),
    "messages": (
        formats_of("harmony"),
        lambda n: "<|start|>assistant<|channel|>final<|message|>Hi<|end|>" * (n // 54),
    ),
    "tags": (
        formats_of("hermes", "granite_tags"),
        lambda n: "<think></think><response>" * (n // 25),
    ),
    "channels": (formats_of("harmony"), lambda n: "<|channel|>" * (n // 11)),
    "headers": (formats_of("harmony"), lambda n: "<|channel|>final" * (n // 16)),
}


def seconds(formats: Formats, text: str, size: int) -> float:
    parser = new_parser(formats)
    start = process_time()
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.finish()
    return process_time() - start


@pytest.mark.parametrize("kind", LONG)
def test_a_long_text_in_small_pieces_takes_linear_time(kind: str) -> None:
    formats, make = LONG[kind]
    short = min(seconds(formats, make(N // 64), 16) for _ in range(3))
    # 16 times as long: quadratic time would be 256 times as much.
    assert seconds(formats, make(N // 4), 16) < 64 * max(short, 0.002)


@pytest.mark.parametrize("kind", LONG)
def test_a_long_piece_takes_linear_time(kind: str) -> None:
    formats, make = LONG[kind]
    short = min(seconds(formats, make(N // 128), N) for _ in range(3))
    assert seconds(formats, make(N // 8), N) < 64 * max(short, 0.002)


@pytest.mark.parametrize("name", [name for name in TOOL_NAMES if name not in TEXT_NAMES])
def test_long_arguments_come_out_whole(name: str) -> None:
    arguments = {"city": "<tool_call> é\n" * (N // 14)}
    parser = new_parser(formats_of(name))
    text = written(name, [("get_weather", arguments)])
    events = [event for at in range(0, len(text), 64) for event in parser.feed(text[at : at + 64])]
    found = [event.text for event in events if isinstance(event, ToolArguments)]
    assert "".join(found) == json.dumps(arguments, ensure_ascii=False)
