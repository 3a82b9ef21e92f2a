"""What becomes of calls that are none, are broken or are cut off: no text is ever lost."""

from __future__ import annotations

import json
import re

import pytest

from asyncllm.text.parsing import Content, End, Message, message_of
from asyncllm.text.parsing.formats import ToolFormat, is_tag
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
    ("tools", "text", "content"),
    [
        # of no tool that was offered
        (
            "hermes",
            '<tool_call>{"name": "nope", "arguments": {"a": "</tool_call>"}}</tool_call> x',
            '{"name": "nope", "arguments": {"a": ""}} x',
        ),
        ("qwen3_coder", "<tool_call>\n<function=no>\n<parameter=a>\n1\n</parameter>", "no\na\n1"),
        ("glm45", "<tool_call>no\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", "no\na\n1"),
        ("olmo3", "<function_calls>nope(a=1)</function_calls>", "nope(a=1)"),
        ("gemma4", 'Hi <|tool_call>call:no{a:<|"|>b<|"|>}<tool_call|>', "Hi no{a:b}"),
        ("mistral", "[TOOL_CALLS]nope[ARGS]{}", "nope{}"),
        ("kimi_k2", "<|tool_call_begin|>no:0<|tool_call_argument_begin|>{}", "no:0{}"),
        # of no arguments, or such that are none
        ("hermes", '<tool_call>{"name": "now", "city": "Paris"}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "now", "arguments": "hello"}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "now", "arguments": tru}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "now", "arguments": }</tool_call>', None),
        ("mistral", "[TOOL_CALLS]now[ARGS]5", "now5"),
        ("mistral", "[TOOL_CALLS]now[ARGS] and so on", "now and so on"),
        ("harmony", "<|channel|>commentary to=functions.now code<|message|>print(1)", "print(1)"),
        # of no form
        ("hermes", ' <tool_call>\n{"name": "now", "arg', ' {"name": "now", "arg'),
        ("hermes", '<tool_call>{"name": "now", "arguments": ', None),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', None),
        ("hermes", '<tool_call>{"arguments": [bad], "name": "now"}</tool_call>', None),
        ("hermes", '<tool_call>{"arguments": {"a": 1', None),
        ("hermes", "<tool_call>{}</tool_call>", None),
        ("hermes", "Use <tool_call> to call, or <tool_c", "Use  to call, or <tool_c"),
        ("hermes", "So </tool_call> it ends", "So it ends"),
        ("mistral", "[TOOL_CALLS][1]", "[1]"),
        ("mistral", "[TOOL_CALLS]" * 3 + "x", "x"),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.now:x<|tool_call_argument_begin|>{}",
            "functions.now:x{}",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=now>\nhm <parameter=a>1</parameter>",
            "\nnow>\nhm a>1",
        ),
        ("olmo3", "As in <function_calls></function_calls>", "As in "),
        ("minimax_m2", "<minimax:tool_call>\nHm.\n</minimax:tool_call>", "Hm.\n"),
        # without a marker it is an answer
        ("llama3_json", '{"name": "nope", "parameters": {}}', ""),
        ("llama3_json", '{"name": "now"}', ""),
        ("llama3_json", '{"city": "Paris", "name": "now", "parameters": {}}', ""),
        ("llama3_json", '{"answer": [{"name": "now", "parameters": {}}]}', ""),
        ("llama3_json", '{\n"a": [\n{"b": 1}]}', ""),
        ("llama3_json", '[{"name": "nope", "parameters": {}}]', ""),
        ("pythonic", "[see(1)](http://x) [1] [now] [", ""),
        ("pythonic", "{[now()]}", ""),
        ("pythonic", "now()", ""),
        ("phi4_mini", "import functools\n@functools.cache\nfunctools []", ""),
        ("glm4", 'now is\n{"a": 1}\nor now\n{}\nnope\n{}', ""),
        ("json", '```json\n{"name": "now"}\n```\n[1, 2]', ""),
        # headers of harmony are no content
        ("harmony", "<|channel|>commentary to=functions.no", None),
        ("harmony", " to=functions.nope<|channel|>commentary<|message|>{}", "{}"),
        ("harmony", "<|channel|>final", None),
        ("harmony", "<|start|>assistant to=a<|constrain|>json", None),
        ("harmony", "<|channel|>final<|message|>a<|message|>b<|constrain|>c", "abc"),
    ],
)
def test_what_is_no_call_is_content_without_its_markup(
    tools: str, text: str, content: str | None
) -> None:
    """``content``: "" for the text itself; None for the text without what stands in < and >."""
    if content is None:
        content = "" if tools == "harmony" else re.sub("<.*?>", "", text).strip()
    elif not content:
        content = text
    assert read(text, tools) == Message(content, "", [])


ELEMENTS = {
    "hermes": ("<tool_call>", "</tool_call>", "\n", '{{"name": "{}", "arguments": {}}}'),
    "mistral": ("[TOOL_CALLS][", "]", ", ", '{{"name": "{}", "arguments": {}}}'),
    "granite": ("[", "]", ", ", '{{"name": "{}", "arguments": {}}}'),
    "phi4_mini": ("functools[", "]", ", ", '{{"name": "{}", "arguments": {}}}'),
    "olmo3": ("<function_calls>", "</function_calls>", "\n", "{}(**{})"),
    "lfm2": ("<|tool_call_start|>[", "]<|tool_call_end|>", ", ", "{}(**{})"),
    "pythonic": ("[", "]", ", ", "{}(**{})"),
}


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("bad", ["nope {}", 'nope {"a": [1, {"b": "]}"}]}', "nope {'a': b'z'}"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_call_leaves_those_beside_it(name: str, bad: str, place: int) -> None:
    begin, end, separator, form = ELEMENTS[name]
    calls = ['now {"a": 1}', 'now {"a": 2}']
    elements = [form.format(*call.split(" ", 1)) for call in (*calls[:place], bad, *calls[place:])]
    if name == "hermes":
        text = separator.join(f"{begin}{element}{end}" for element in elements)
    else:
        text = begin + separator.join(elements) + end
    message = read(text, name)
    assert [json.loads(call.arguments) for call in message.calls] == [{"a": 1}, {"a": 2}]
    assert message.content.strip() == elements[place]


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('{"name": "now", "arguments": {"a": tru, }}</tool_call> x', '{"a": "tru" }', "x"),
        ('{"name": "now", "arguments": {"a": NaN, "b": -Infinity}}', '{"a": null, "b": null}', ""),
        ('{"name": "now", "arguments": {\'a\': 1}}\n</tool_call>', '{"a": 1}', ""),
        ('{"name": "now", "arguments": "{\\x}"}</tool_call>', '{"\\\\x":null}', ""),
        ('{"name": "now", "arguments": {"a": "\\x \\d \n\t"}}', '{"a": "\\\\x \\\\d \\n\\t"}', ""),
        (
            r'{"name": "now", "arguments": {"\ud83d": "\ud83d\ude42\ude42\ud83dx\u00e9\x41"}}',
            '{"\ufffd": "\\ud83d\\ude42\ufffd\ufffdx\\u00e9A"}',
            "",
        ),
        ('{"name": "now", "arguments": {"a": "b "c" d"}}', '{"a": "b \\"c\\" d"}', ""),
        ('{"name": "now", "arguments": {"a": 1 "b": [1 2],}}', '{"a": 1, "b": ["1 2"]}', ""),
        (
            '{"name": "now", "arguments": {"a": [1, {"b": 2}}</tool_call>x',
            '{"a": [1, {"b": 2}]}',
            "x",
        ),
        # what follows the arguments and does not belong to the call
        ('{"name": "now", "arguments": {}, "a" b}</tool_call>', "{}", ', "a" b}'),
        ('{"name": "now", "arguments": {}} b</tool_call>', "{}", "b"),
        ('{"name": "now", "arguments": {}}} b', "{}", "}b"),
        ('[{"name": "now", "arguments": {}}, {"name": "no', "{}", '{"name": "no'),
    ],
)
def test_json_that_goes_wrong_within_a_call(text: str, arguments: str, content: str) -> None:
    message = read("<tool_call>" + text, "hermes")
    assert [call.arguments for call in message.calls] == [arguments]
    assert message.content == content


NEXT = '<tool_call>{"name": "now", "arguments": {"n": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": "b}}</tool_call>\n' + NEXT, '{"a": "b}}"}'),  # a string without its end
        ('{"a": "b}}' + NEXT, '{"a": "b}}"}'),
        ('{"a": {"b": 1</tool_call>' + NEXT, '{"a": {"b": 1}}'),
        ('{"a": ["b", </tool_call>' + NEXT, '{"a": ["b"]}'),
        ('{"a</tool_call>' + NEXT, "{}"),
        ('{"a": ' + NEXT, "{}"),
        ('{"a": "</tool_call>\\n<tool_call>{\\"name\\": 1}"}}</tool_call>' + NEXT, None),
    ],
)
def test_arguments_without_their_end_leave_the_next_call(text: str, arguments: str | None) -> None:
    """But a marker in a string that is closed is text."""
    message = read('<tool_call>{"name": "now", "arguments": ' + text, "hermes")
    if arguments is None:
        arguments = text[: text.index("}</tool_call>" + NEXT)]
    assert [call.arguments for call in message.calls] == [arguments, '{"n": 1}']
    assert message.content == ""


@pytest.mark.parametrize(
    ("tools", "text", "arguments", "content"),
    [
        (
            "deepseek_v3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{a}\n```<｜tool▁call▁end｜>x",
            '{"a":null}',
            "x",
        ),
        # without a marker that ends the call: to the next call, or to the end
        ("llama3_json", '{"name": "now", "parameters": {a}} x', '{"a":null}', "x"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{a[TOOL_CALLS]x", "{}", "x"),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>{a<|call|>", "{}", ""),
        *(
            ("olmo3", f"<function_calls>now({written}</function_calls>x", arguments, "x")
            for written, arguments in (
                ("a=San Francisco, b=1)", '{"a": "San Francisco", "b": 1}'),
                ("a=f(1, [2]), b=float('inf'))", '{"a": "f(1, [2])", "b": "float(\'inf\')"}'),
                ("a='x' 5)", '{"a": "x\' 5)"}'),
                ("a=('x', 5, b=1)", '{"a": ["x", 5, "b=1"]}'),
                ("**{}, a=1)", '{"a": 1}'),
                ("a=[1 2])", '{"a": ["1 2"]}'),
                ("a=inf, b=-nan)", '{"a": null, "b": null}'),
                ("*a)", '{"0": "a"}'),
                ("5, b=007)", '{"0": 5, "b": "007"}'),
                ("a=" + "[" * 65, '{"a": ' + "[" * 65 + "]" * 65 + "}"),
            )
        ),
        ("olmo3", "<function_calls>now() and so on</function_calls>", "{}", "and so on"),
        (
            "qwen3_coder",
            "<function=now><parameter=a>1</parameter> b </function>",
            '{"a": "1"}',
            "b ",
        ),
        # a marker left out within parameters
        (
            "glm45",
            "<tool_call>now\n<arg_key>a\n<arg_value>1</arg_value>\n</tool_call>x",
            '{"a": "1"}',
            "x",
        ),
        (
            "glm45",
            "<tool_call>now<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2"
            "</tool_call>",
            '{"a": "1", "b": "2"}',
            "",
        ),
        (
            "minimax_m2",
            '<invoke name="now"><parameter name="a">1</invoke>\n</minimax:tool_call>x',
            '{"a": "1"}',
            "x",
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
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, "b\\u0', '{"a": [1, "b"]}'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1, "b": ', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1, "b', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": tr', '{"a": true}'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1.', '{"a": 1.0}'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\u00', "{}"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{", "{}"),
        ("qwen3_coder", "<function=get_weather><parameter=ci", "{}"),
        ("qwen3_coder", "<function=get_weather><parameter=city>\nPar", '{"city": "Par"}'),
        ("qwen3_coder", "<function=get_weather><parameter=city>\nPar\n</para", '{"city": "Par"}'),
        ("qwen3_coder", "<function=get_weather><parameter=days>\n1", '{"days": 1}'),
        ("qwen3_coder", "<function=get_weather><parameter=area>\n[1, {", '{"area": [1, {}]}'),
        ("qwen3_coder", "<function=now><parameter=a>\n1\n</parameter>\n<para", '{"a": "1"}'),
        ("harmony", '<|channel|>commentary to=functions.now<|message|>{"a', "{}"),
        ("olmo3", "<function_calls>now(a =", "{}"),
        ("olmo3", "<function_calls>get_weather(city='Par", '{"city": "Par"}'),
        ("olmo3", "<function_calls>get_weather(city='Par\\u00", '{"city": "Par"}'),
        ("olmo3", "<function_calls>get_weather(exact=Tr", '{"exact": true}'),
        ("olmo3", "<function_calls>get_weather(area=(1, 'a", '{"area": [1, "a"]}'),
        ("gemma4", '<|tool_call>call:now{a:<|"|>b', '{"a":"b"}'),
    ],
)
def test_arguments_that_are_cut_off_are_closed(tools: str, text: str, arguments: str) -> None:
    for cut_off in (False, True):
        parser = new_parser(formats_of(tools))
        events = parser.feed(text) + parser.finish(cut_off=cut_off)
        assert message_of(events).calls[0].arguments == arguments
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
    text = "Hi. " + written(name, [("get_weather", {"city": "x", "days": 17})])
    formats = formats_of(name)
    assert isinstance(formats.tools, ToolFormat)
    tags = [marker for marker in formats.tools.outer_markers() if is_tag(marker)]
    for end in range(len(text)):
        message = read(text[:end], name)
        assert not any(tag in message.content for tag in tags)
        if not message.calls:
            assert all(word in message.content for word in re.findall(r"Hi\.|get_\w+", text[:end]))
            continue
        rest = message.content.removeprefix("Hi. ")  # a marker that is cut off is text
        assert any(marker.startswith(rest) for marker in formats.markers())
        arguments = json.loads(message.calls[0].arguments)
        assert arguments in (
            {},
            {"city": ""},
            *({"city": "x", **days} for days in ({}, {"days": 1})),
        ) or (arguments == {"city": "x", "days": 17})


@pytest.mark.parametrize("name", sorted({*TOOL_NAMES} - {"glm4", "pythonic"}))
def test_markup_that_is_cut_off_is_no_content(name: str) -> None:
    """It was not the model that ended the text: what has begun is a call by then, or nothing.

    In the two formats left out, what has begun may be an answer.
    """
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
            '{"name": "nope", "arguments": {',
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
