"""Values of parameters that hold the markers of their own format: a model writes about them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from asyncllm.text.parsing import End, choose_formats, message_of
from asyncllm.text.parsing.formats import ToolFormat
from tests.support.text.parsing_texts import (
    TEXT_NAMES,
    TOOL_NAMES,
    WRITERS,
    Call,
    formats_of,
    new_parser,
    parse_all,
    read,
    tool,
    written,
)
from tests.support.text.templates import OTHER_CALLS, chat_template
from tests.unit.text.parsing.test_cuts import assert_cuts_do_not_matter

_INNER: list[Call] = [("get_weather", {"city": "a", "area": {"b": 1}}), ("now", {})]


def _markers(name: str) -> dict[str, str]:
    form = formats_of(name).tools
    assert isinstance(form, ToolFormat)
    call = form.calls[0]
    assert call.named is not None
    style = call.named.parameters
    assert style is not None
    one = WRITERS[name][1]("x", {"a": "b"})
    return {
        "open": call.named.head or call.begin,
        "key": style.key_begin,
        "begin": style.value_begin,
        "close": style.value_end,
        "end": call.end[0],
        "ends": " ".join(call.end),
        "another": one[one.index(style.key_begin) : one.rindex(style.value_end)] + style.value_end,
        "call": WRITERS[name][1](*_INNER[0]),
        "calls": written(name, _INNER),
    }


VALUES = {
    "a closing marker": "a {close} b",
    "at the beginning of a line": "a\n{close}\nb\n{close}",
    "several": "{close}{close} {close}",
    "markup of another kind": '<function name="f">\n<a b="1">x{close}\n</a> more',
    "other markers that close": "{end} or {close}\nor {end} x",
    "all markers that close": "{close} {ends} and more {close} {ends} x",
    "another parameter": "So:\n{another} and",
    "a marker that opens": "Use {open}NAME to call, with {key} and {begin}x",
    "a whole call": "As in {call} and so on",
    "a call on its own lines": "So:\n{call}\nDone.",
    "several calls": "{calls}\n\n{call}{calls} x",
    "a call at its end": "So:\n\n{calls}",
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", TEXT_NAMES)
def test_a_value_may_hold_its_own_markers(name: str, kind: str) -> None:
    markers = _markers(name)
    value = VALUES[kind].format(**markers)
    area = {"docs": "a {close} b".format(**markers)}  # read once it is whole
    calls: list[Call] = [
        ("get_weather", {"city": value, "area": area}),
        ("now", {}),
        ("get_weather", {"area": area, "days": 3, "city": value}),
        ("search.web", {"query": "x"}),
    ]
    for made in (calls, calls[:1], calls[2:3]):
        assert _calls(written(name, made), name) == made
    assert_cuts_do_not_matter(written(name, calls[1:3]), formats_of(name))


def _calls(text: str, name: str) -> list[Call]:
    message = read(text, name)
    assert message.content == ""
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize("kind", ["a closing marker", "several", "other markers that close"])
@pytest.mark.parametrize("name", ["tags", "tags that are names", "elements", "tags with kinds"])
def test_so_may_values_of_derived_formats(name: str, kind: str) -> None:
    calls, text = OTHER_CALLS[name]
    formats = choose_formats(chat_template(calls))
    assert isinstance(formats.tools, ToolFormat)
    call = formats.tools.calls[0]
    assert call.named is not None
    assert call.named.parameters is not None
    close = call.named.parameters.value_end.replace("{}", "a")
    value = VALUES[kind].format(close=close, end=call.end[0])
    text = text.replace(">1", ">" + value).replace('"false"', '"true"')
    tools = [tool("f", a={"type": "string"})]
    message = parse_all(text, formats, tools=tools)
    assert [json.loads(c.arguments) for c in message.calls] == [{"a": value}, {}]
    assert message.content.strip() == ""
    assert_cuts_do_not_matter(text, formats, tools=tools)


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_a_tag_that_closes_a_value_may_be_written_in_an_odd_way(name: str) -> None:
    call: Call = ("get_weather", {"city": "x", "days": 5})
    formats = formats_of(name)
    text = written(name, [call])
    close = _markers(name)["close"]
    for odd in ("/>", "1>", "", "_function>", "function>", ">"):
        spoiled = text.replace(close, close[:-1] + odd)
        for whole in (spoiled, spoiled.replace("\n", ""), spoiled + written(name, [("now", {})])):
            assert _calls(whole, name)[0] == call
            assert_cuts_do_not_matter(whole, formats)
        # where something else follows it, it is text
        call_with_text: Call = ("get_weather", {"city": f"a\n{close[:-1]}{odd[:-1]}s>\nb"})
        assert _calls(written(name, [call_with_text]), name) == [call_with_text]


def test_a_name_that_is_not_closed_ends_with_its_line() -> None:
    call: Call = ("get_weather", {"city": "x\ny", "days": 5})
    text = written("qwen3_coder", [call])
    for key in ("<parameter=city", "<parameter=days"):
        spoiled = text.replace(key + ">", key)
        assert _calls(spoiled, "qwen3_coder") == [call]
        assert_cuts_do_not_matter(spoiled, formats_of("qwen3_coder"))


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_markers_that_nothing_plausible_follows_end_a_value_in_the_end(name: str) -> None:
    """And the calls behind it are calls."""
    text = written(name, [("get_weather", {"city": "Oslo"})])
    markers = _markers(name)
    close = markers["close"]
    for between in ("more", "more {open} and", "\nmore\n{end}\n{open}"):
        spoiled = text.replace(close, close + between.format(**markers))
        message = read(spoiled + written(name, [("now", {})]), name)
        assert json.loads(message.calls[0].arguments) == {"city": "Oslo"}
        assert message.content.strip().startswith("more")
        assert "more" not in "".join(call.arguments for call in message.calls)


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_a_value_with_markers_that_is_cut_off_is_the_beginning_of_the_value(name: str) -> None:
    value = VALUES["a closing marker"].format(**_markers(name))
    text = written(name, [("get_weather", {"city": value})])
    parser = new_parser(formats_of(name))
    events = parser.feed(text[: text.index(" b") + 2]) + parser.finish(cut_off=True)
    message = message_of(events)
    assert [json.loads(call.arguments) for call in message.calls] == [{"city": value}]
    assert events[-1] == End(1, open_call=True, open_reasoning=False)


def test_a_value_full_of_markers_is_read_in_linear_time() -> None:
    markers = _markers("qwen3_coder")
    piece = "<parameter=a>\n{open}x>{close} y\n".format(**markers)

    def read_many(number: int) -> None:
        parser = new_parser(formats_of("qwen3_coder"))
        parser.feed("<tool_call><function=now>" + piece * number)
        parser.finish()

    lines = [_num_lines(partial(read_many, number)) for number in (200, 400)]
    assert lines[1] < 2.5 * lines[0]


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_many_tools_are_prepared_at_once(name: str) -> None:
    """A parser is made on the event loop."""
    tools = [tool(f"tool_number_{number}_of_many", a={}) for number in range(400)]
    assert _num_lines(lambda: new_parser(formats_of(name), tools=tools)) < 60_000


def _num_lines(run: Callable[[], object]) -> int:
    """How many lines of Python are run."""
    number = 0

    def count(*_: Any) -> Any:
        nonlocal number
        number += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        run()
    finally:
        sys.settrace(before)
    return number
