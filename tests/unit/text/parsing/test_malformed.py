"""What becomes of calls that are none, are broken or are cut off: no text is ever lost."""

from __future__ import annotations

import json
import re

import pytest

from asyncllm.text.parsing import Content, End, Formats, Message, ToolArguments, message_of
from asyncllm.text.parsing.formats import ToolFormat
from tests.support.text.parsing_texts import (
    TAGGED_NAMES,
    TOOL_NAMES,
    events_of,
    formats_of,
    new_parser,
    read,
    written,
)


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '<tool_call>{"name": "nope", "arguments": {"a": "</tool_call>"}}</tool_call> x'),
        ("hermes", ' <tool_call>\n{"name": "now", "arg'),
        ("hermes", '<tool_call>{"name": "now", "arguments": '),
        ("hermes", '<tool_call>{"name": "now", "arguments": }</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "city": "Paris"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {bad}, "name": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1'),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", "<tool_call>now</tool_call>"),
        ("hermes", "Use <tool_call> to call, or <tool_c"),
        ("llama3_json", '{"name": "nope", "parameters": {}}'),
        ("llama3_json", '{"name": "now"}'),
        ("llama3_json", '{"city": "Paris", "name": "now", "parameters": {}}'),
        ("llama3_json", 'As in {"name": "now", "parameters": {}}'),
        ("llama3_json", '{\n"a": [\n{"b": 1}]}'),
        ("json", '```json\n{"name": "now"}\n```\n[1, 2]'),
        ("mistral", "[TOOL_CALLS]nope[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]now {}"),
        ("mistral", "[TOOL_CALLS]now[ARGS]"),
        ("mistral", "[TOOL_CALLS]now[ARGS] and so on"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("kimi_k2", "<|tool_call_begin|>functions.now:x<|tool_call_argument_begin|>{}"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}"),
        ("qwen3_coder", "<tool_call>\n<function=nope>\n<parameter=a>\n1\n</parameter></function>"),
        ("qwen3_coder", "<tool_call>\n<function=now>\nhm <parameter=a>1</parameter>"),
        ("qwen3_coder", "<function=now>"),
        ("olmo3", "<function_calls>nope(a=1)</function_calls>"),
        ("olmo3", "<function_calls>now</function_calls>"),
        ("olmo3", "As in <function_calls></function_calls>"),
        ("harmony", "<|channel|>commentary to=functions.no"),
        ("harmony", " to=functions.nope<|channel|>commentary<|message|>{}"),
        ("harmony", "<|channel|>final"),
    ],
)
def test_what_is_not_a_call_is_content_as_generated(tools: str, text: str) -> None:
    assert read(text, tools) == Message(text, "", [])


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('{"name": "now", "arguments": {"a": tru, }}</tool_call> x', '{"a": tru, }}', "x"),
        ('{"name": "now", "arguments": {\'a\': 1}}\n</tool_call>', "{'a': 1}}\n", ""),
        ('{"name": "now", "arguments": "{\\x}"}</tool_call>', '{\\x}"}', ""),
        # what follows the arguments and does not belong to the call
        ('{"name": "now", "arguments": {}, "a" b}</tool_call>', "{}", ', "a" b}</tool_call>'),
        ('{"name": "now", "arguments": {}} b</tool_call>', "{}", "b</tool_call>"),
        ('{"name": "now", "arguments": {}}} b', "{}", "}b"),
        ('[{"name": "now", "arguments": {}}, {"name": "no', "{}", ', {"name": "no'),
    ],
)
def test_json_that_goes_wrong_within_a_call(text: str, arguments: str, content: str) -> None:
    message = read("<tool_call>" + text, "hermes")
    assert [call.arguments for call in message.calls] == [arguments]
    assert message.content == content


@pytest.mark.parametrize(
    ("tools", "text", "arguments", "content"),
    [
        (
            "deepseek_v3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{a}\n```<｜tool▁call▁end｜>x",
            "{a}\n",
            "x",
        ),
        # without a marker that ends the call: to the next call, or to the end
        ("llama3_json", '{"name": "now", "parameters": {a}} x', "{a}} x", ""),
        ("mistral", "[TOOL_CALLS]now[ARGS]{a}[TOOL_CALLS]x", "{a}", "[TOOL_CALLS]x"),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>{a}<|call|>", "{a}", ""),
        *(
            ("olmo3", f"<function_calls>now({written}</function_calls>x", arguments, "x")
            for written, arguments in (
                ("a=San Francisco, b=1)", '{"a": San Francisco, b=1)'),
                ("a=f(1))", '{"a": f(1))'),
                ("a='x' 5)", '{"a": "x"5)'),
                ("a=('x' 5), b=1)", '{"a": ["x"5), b=1)'),
                ("**{}, a=1)", "{},a=1)"),
                ("a=[1 2])", '{"a": [12])'),
                ("a=inf)", '{"a": inf)'),
                ("a=nan)", '{"a": nan)'),
                ("*a)", "*a)"),
                ("5)", "{5)"),
                ("a=" + "[" * 65, '{"a": ' + "[" * 65),
            )
        ),
        (
            "olmo3",
            "<function_calls>now() and so on</function_calls>",
            "{}",
            "and so on</function_calls>",
        ),
        (
            "qwen3_coder",
            "<function=now><parameter=a>1</parameter> b </function>",
            '{"a": "1"}',
            "b </function>",
        ),
    ],
)
def test_calls_that_go_wrong(tools: str, text: str, arguments: str, content: str) -> None:
    message = read(text, tools)
    assert [call.arguments for call in message.calls] == [arguments]
    assert message.content == content


@pytest.mark.parametrize(
    ("tools", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, "b\\u0', '{"a": [1, "b\\u0'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\u00', '{"a": \\u00'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{", "{"),
        ("qwen3_coder", "<function=get_weather><parameter=ci", '{"ci'),
        ("qwen3_coder", "<function=get_weather><parameter=city>\nPar", '{"city": "Par'),
        ("qwen3_coder", "<function=get_weather><parameter=days>\n1", '{"days": 1'),
        ("qwen3_coder", "<function=now><parameter=a>\n1\n</parameter>\n<para", '{"a": "1"'),
        ("harmony", '<|channel|>commentary to=functions.now<|message|>{"a', '{"a'),
        ("olmo3", "<function_calls>now(a =", '{"a": '),
        ("olmo3", "<function_calls>get_weather(city='Par", '{"city": "Par'),
        ("olmo3", "<function_calls>get_weather(city='Par\\u00", '{"city": "Par\\\\u00'),
        ("olmo3", "<function_calls>get_weather(exact=Tr", '{"exact": Tr'),
        ("olmo3", "<function_calls>get_weather(area=(1, 'a", '{"area": [1, "a'),
    ],
)
def test_arguments_that_are_cut_off_stay_so(tools: str, text: str, arguments: str) -> None:
    events = events_of([text], formats_of(tools))
    assert [event.text for event in events if isinstance(event, ToolArguments)] == [arguments]
    assert events[-1] == End(1, open_call=True, open_reasoning=False)
    assert not any(isinstance(event, Content) for event in events)


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_no_character_is_lost_wherever_it_is_inserted(name: str) -> None:
    text = written(name, [("get_weather", {"city": "x", "days": 5}), ("now", {})])
    # A header of harmony is markup through and through, and so is a call's id.
    markup = r'(<\|start\|>assistant)?<\|channel\|>.*?<\|message\|>|"tool_call_id": "0"'
    spans = [match.span() for match in re.finditer(markup, text)]
    for at in range(len(text) + 1):
        if any(start < at < end for start, end in spans):
            continue
        message = read(text[:at] + "✓" + text[at:], name)
        found = message.content + "".join(call.arguments for call in message.calls)
        assert found.count("✓") == 1, (at, message)


@pytest.mark.parametrize("name", TAGGED_NAMES)
def test_truncation_loses_no_text(name: str) -> None:
    text = "Hi. " + written(name, [("get_weather", {"city": "x"})])
    formats = formats_of(name)
    assert isinstance(formats.tools, ToolFormat)
    for end in range(len(text)):
        message = read(text[:end], name)
        cut_marker = beginning_at_end(text[:end], formats)
        if not message.calls:
            shown = text[:end]
            for marker in formats.tools.ignored:
                shown = re.sub(re.escape(marker) + r"\s*", "", shown)
            assert message.content == shown
        else:
            # A marker that is cut off is text, but for the one that ends the call.
            assert message.content in ("Hi. ", "Hi. " + cut_marker.lstrip("\n"))
            arguments = message.calls[0].arguments
            escaped = json.dumps(cut_marker)[1:-1]
            whole = json.dumps({"city": "x"})
            assert whole.startswith(arguments) or whole.startswith(arguments.removesuffix(escaped))


def beginning_at_end(text: str, formats: Formats) -> str:
    """The longest end of a text that is the beginning of a marker, on a line of its own or not."""
    markers = [marker for plain in formats.markers() for marker in (plain, "\n" + plain)]
    ends = (text[at:] for at in range(len(text)))
    return next((end for end in ends if any(marker.startswith(end) for marker in markers)), "")


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_markup_that_is_cut_off_is_no_content(name: str) -> None:
    """It was not the model that ended the text: what has begun is a call by then, or nothing."""
    calls = written(name, [("get_weather", {"city": "x"}), ("now", {})])
    formats = formats_of(name)
    # Those of harmony are single tokens.
    markers = re.finditer(r"<\|\w+\|>", calls) if name == "harmony" else ()
    within = {at for found in markers for at in range(found.start() + 1, found.end())}
    for end in set(range(len(calls))) - within:
        for size in (1, 4, end + 1):
            parser = new_parser(formats)
            events = [
                e
                for at in range(0, end, size)
                for e in parser.feed(calls[at : min(at + size, end)])
            ]
            message = message_of(events + parser.finish(cut_off=True))
            assert message.content == "", calls[:end]
            assert [call.name for call in message.calls] == ["get_weather", "now"][
                : len(message.calls)
            ]
            assert parser.in_call == events_of([calls[:end]], formats)[-1].open_call  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tools", "text", "content"),
    [
        ("hermes", 'Sure.<tool_call>\n{"name": "now", "arg', "Sure."),
        (
            "hermes",
            '<tool_call>\n{"name": "nope", "arguments": {',
            '<tool_call>\n{"name": "nope", "arguments": {',
        ),
        ("hermes", "1 <tool_c", "1 <tool_c"),  # in the middle of a text it may be anything
        ("hermes", "  ", "  "),
        ("harmony", "<|channel|>final<|message|>So<|end|><|start|>assi", "So"),
        ("qwen3_coder", "a\n<tool_call>\n<function=no", "a\n"),
        ("llama3_json", '{"name": "now", "par', '{"name": "now", "par'),  # it may be an answer
    ],
)
def test_what_is_left_of_a_text_that_is_cut_off(tools: str, text: str, content: str) -> None:
    parser = new_parser(formats_of(tools))
    assert message_of(parser.feed(text) + parser.finish(cut_off=True)) == Message(content, "", [])
