"""Calls in all the variants in which models write them."""

from __future__ import annotations

import re
from itertools import product

import pytest

from tests.support.text.parsing_texts import (
    TAGGED_NAMES,
    TOOL_NAMES,
    calls_of,
    formats_of,
    parse_all,
    read,
    tool,
    written,
)
from tests.unit.text.parsing.test_cuts import assert_cuts_do_not_matter

NOW = [("now", "{}")]
#: Markers around lists of calls.
LISTS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", ""),
    "granite": ("<|tool_call|>", ""),
    "phi4_mini": ("<|tool_call|>", "<|/tool_call|>"),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "command": ("<|START_ACTION|>", "<|END_ACTION|>"),
}
PYTHON = [("now", '{"a": true, "b": [null, 1]}')]

# Within <tool_call> and </tool_call>.
HERMES = [
    # keys in any order, spaces anywhere, further keys, escapes in names
    ('{"arguments":{},"name":"now"}', NOW),
    (' { "name" : "now" , "arguments" : {} } ', NOW),
    ('{"id": 7, "name": "n\\u006fw", "arguments": {}, "x": [{}]}', NOW),
    # as generated: numbers, spaces, escapes, keys that occur twice
    (
        '{"name": "now", "arguments": { "a":1.50 ,"a" : "\\u00e9\\/" }}',
        [("now", '{ "a":1.50 ,"a" : "\\u00e9\\/" }')],
    ),
    # arguments as a string stand for its content
    (
        '{"name": "now", "arguments": "{\\"a\\": \\"\\\\n\\ud83d\\ude42\\"}"}',
        [("now", '{"a": "\\n🙂"}')],
    ),
    ('{"arguments": "{\\"a\\": 1}", "name": "now"}', [("now", '{"a": 1}')]),
    # of several the first
    ('{"name": "now", "arguments": {"a": 1}, "parameters": {}}', [("now", '{"a": 1}')]),
    ('{"arguments": {"a": 1}, "parameters": {}, "name": "now"}', [("now", '{"a": 1}')]),
    # none at all
    ('{"name": "now"}', NOW),
    ('{"name": "now", "arguments": null}', NOW),
    ('{"name": "now", "arguments": ""}', NOW),
    ('{"name": "now", "arguments": " null "}', NOW),
    ('{"name": "now", "arguments": []}', NOW),
    # in Python's notation, or without quotes
    ("{'name': 'now', 'arguments': {'a': True, 'b': (None, 1)}}", PYTHON),
    ('{name: "now", arguments: {a: True, "b": [None, 1]}}', PYTHON),
    ('{"name": "now", "arguments": "{\'a\': True, \'b\': [null, 1]}"}', PYTHON),
    # in a fence
    ('\n```json\n{"name": "now", "arguments": {}}\n```\n', NOW),
    # a bracket too many or too few
    ('{"name": "now", "arguments": {}}}', NOW),
    ('{"name": "now", "arguments": {}', NOW),
    # a list
    ('[{"name": "now"}, {"name": "now"}]', NOW * 2),
    # OpenAI's own
    ('{"type": "function", "function": {"name": "now", "arguments": "{}"}}', NOW),
]


@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder", "glm45", "json"])
@pytest.mark.parametrize(("text", "calls"), HERMES)
def test_json_in_tags(tools: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert calls_of(f"<tool_call>{text}</tool_call>", tools) == calls


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "now", "arguments": {}}</tool_',
        '<tool_call>{"name": "now", "arguments": {}}',
        '<tool_call>{"name": "now", "arguments": {}, "id": "x',
        '<tool_call>{"name": "now"} ',
    ],
)
def test_the_end_of_the_text_ends_a_call(text: str) -> None:
    assert calls_of(text, "hermes") == NOW
    assert calls_of('<tool_call>{"name": "now"}\n' + text, "hermes") == NOW * 2


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<|python_tag|>{"name": "now", "parameters": {}}', NOW),
        ('<|python_tag|>{"name": "now"}; {"name": "now"}', NOW * 2),
        ("<|python_tag|>now.call()", NOW),
        ("<|python_tag|>now.call(a=True, b=[None, 1])", PYTHON),
        ("<|python_tag|>now(a=True, b=[None, 1])", PYTHON),
        ('```json\n{"name": "now", "parameters": {}}\n```', NOW),
        ('{"type": "function", "name": "now", "parameters": {}}', NOW),
        ('{"type": "function", "function": {"name": "now", "parameters": {}}}', NOW),
        ('{"type": "function", "function": "now", "parameters": {}}', NOW),
        ('{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}};', NOW * 2),
        ('{"name": "now", "parameters": {}};{"name": "now", "parameters": {}}', NOW * 2),
        ('<function=now>{"a": 1}</function>', [("now", '{"a": 1}')]),
        ('[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}]', NOW * 2),
    ],
)
def test_llama(text: str, calls: list[tuple[str, str]]) -> None:
    assert calls_of(text, "llama3_json") == calls


@pytest.mark.parametrize("tools", ["mistral", "mistral_args"])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc123def"}]', NOW),
        ('[TOOL_CALLS]{"name": "now", "arguments": {}}', NOW),
        ("[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]now[ARGS]{}", NOW * 2),
        ('[TOOL_CALLS]now[ARGS]"{}"', NOW),
        # separators that are left out
        ("[TOOL_CALLS]now{}[TOOL_CALLS] now {}", NOW * 2),
        ("[TOOL_CALLS]now[CALL_ID]abc123def{}", NOW),
        ("[TOOL_CALLS]now[ARGS]", NOW),
    ],
)
def test_mistral(tools: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert calls_of(text, tools) == calls


@pytest.mark.parametrize(
    ("tools", "text", "calls"),
    [
        ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", NOW),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.search.web:12<|tool_call_argument_begin|>{}"
            "<|tool_call_end|>",
            [("search.web", "{}")],
        ),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}\n```", NOW),
        ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}", NOW),
        ("kimi_k2", "<|tool_call_begin|>functions.now:0{}<|tool_call_end|>", NOW),
        ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', NOW),
        ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', NOW),
        ("granite", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', NOW),
        ("granite", '[{"name": "now", "arguments": {}}]', NOW),
        ("phi4_mini", 'functools[{"name": "now", "arguments": {}}]', NOW),
        ("phi4_mini", ' functools [{"name": "now", "parameters": {}},{"name": "now"}]', NOW * 2),
        ("phi4_mini", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', NOW),
        ("phi4_mini", '{"name": "now", "arguments": {}}', NOW),
        ("json", 'functools[{"name": "now", "arguments": {}}]', NOW),
        ("json", '<tool_calls>\n{"name": "now"}\n{"name": "now"}\n</tool_calls>', NOW * 2),
        ("pythonic", "<|python_start|>[now(), now()]<|python_end|>", NOW * 2),
        ("pythonic", "```tool_code\nnow()\n```", NOW),
        ("lfm2", "<|tool_call_start|>[now(), now()]<|tool_call_end|>", NOW * 2),
        ("lfm2", '<|tool_call_start|>[{"name": "now"}]<|tool_call_end|>', NOW),
        ("glm4", "now\n{}\nnow\n{}", NOW * 2),
        ("gemma4", "call:now{}", NOW),  # without its tag
        ("gemma4", "call:now{}<tool_call|>\ncall:now{}", NOW * 2),
        ("gemma4", "<|tool_call>call:now{}<tool_call|><|tool_call>call:now{}<tool_call|>", NOW * 2),
        (
            "gemma4",
            "<|tool_call>call:now{a:true,b:[null,1]}<tool_call|>",
            [("now", '{"a":true,"b":[null,1]}')],
        ),
        (
            "gemma4",
            '<|tool_call>call:now{a:{<|"|>b c<|"|>:<|"|>it\'s "d"\\n{<|"|>}}<tool_call|>',
            [("now", '{"a":{"b c":"it\'s \\"d\\"\\\\n{"}}')],
        ),
        ("json", '[{"name": "now", "parameters": {}}, {"name": "now", "arguments": {}}]', NOW * 2),
        ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", NOW),
        *(
            ("harmony", text, NOW)
            for text in (
                "<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>",
                # without the type, the namespace or the space, on another channel, without an end
                "<|channel|>commentary to=functions.now<|message|>{}<|call|>",
                "<|channel|>commentary to=now<|message|>{}<|call|>",
                "<|channel|>commentaryto=functions.now<|message|>{}<|call|>",
                "<|channel|>analysis to=functions.now <|constrain|>json<|message|>{}<|call|>",
                "<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}",
                "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>",
                "<|start|>functions.now to=functions.now<|message|> null <|call|>",
                "<|channel|>commentary to=functions.now <|constrain|>json{}<|call|>",
                "<|channel|>commentary to=functions.now {}<|call|>",
                "<|channel|>analysis<|channel|>commentary to=functions.now<|message|>{}<|call|>",
            )
        ),
    ],
)
def test_others(tools: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert calls_of(text, tools) == calls


@pytest.mark.parametrize(
    ("tools", "text", "calls"),
    [
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", NOW),
        ("qwen3_coder", "<function=now>\n</function>\n</tool_call>", NOW),
        (
            "qwen3_coder",
            '<tool_call><function=now>{"a": 1}</function></tool_call>',
            [("now", '{"a": 1}')],
        ),
        # typed by the schema; one line break on each side is markup
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=city>\n\n5\n\n</parameter>"
            "<parameter=days> 5 </parameter><parameter=exact>True</parameter>"
            "<parameter=area>[1,  2]</parameter></function></tool_call>",
            [("get_weather", '{"city": "\\n5\\n", "days": 5, "exact": true, "area": [1,  2]}')],
        ),
        (
            "qwen3_coder",
            "<function=search.web><parameter=lang>None</parameter></function></tool_call>",
            [("search.web", '{"lang": null}')],
        ),
        # where there is none at the beginning, the one at the end is the value's
        (
            "qwen3_coder",
            "<tool_call><function=search.web><parameter=query>a\n\nb\n</parameter></function>"
            "</tool_call>",
            [("search.web", '{"query": "a\\n\\nb\\n"}')],
        ),
        # a value that is not of its type is a string; a marker left out is forgiven
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=days>\nfive\n<parameter=city>\nx\n"
            "</function></tool_call>",
            [("get_weather", '{"days": "five", "city": "x"}')],
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>\n</arg_value>\n"
            "</tool_call>",
            [("get_weather", '{"city": "\\n"}')],
        ),
    ],
)
def test_parameters_as_text(tools: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert calls_of(text, tools) == calls


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("city='Paris', days=3", '{"city": "Paris", "days": 3}'),
        ('\n  city = "Paris",\n  days = 3,\n', '{"city": "Paris", "days": 3}'),
        ("exact=True, area=[None, False, ]", '{"exact": true, "area": [null, false]}'),
        ("exact=true, area=[null, false]", '{"exact": true, "area": [null, false]}'),
        ("area={'a': (1, 2), 3: {}}", '{"area": {"a": [1, 2], "3": {}}}'),
        ("days=-1.5e-3, a=1_000, b=0x1F, c=.5, d=+2", None),
        (
            r"city='It\'s \"a\"\n\x41\u00e9\U0001f642\q\\'",
            '{"city": "It\'s \\"a\\"\\nAé🙂\\\\q\\\\"}',
        ),
        (r"city='\ud83d\ude42'", r'{"city": "\ud83d\ude42"}'),
        ("city='''a 'b'\n''', days=1", '{"city": "a \'b\'\\n", "days": 1}'),
        ("city=('Par'\n 'is'), days=(3)", '{"city": "Paris", "days": 3}'),
        ("area=(1,), days=((2))", '{"area": [1], "days": 2}'),
        ("area={'a', \"b\", 3, None}, days=1", '{"area": ["a", "b", 3, null], "days": 1}'),
        (
            "area=[{}, {1}, {'a': {'b'}}, {\n 2 ,\n 3,}]",
            '{"area": [{}, [1], {"a": ["b"]}, [2, 3]]}',
        ),
        ("area=(), city='a' \"b\" '''c'''", '{"area": [], "city": "abc"}'),
        (r"city='\x41\0\101\18\a'", r'{"city": "A\u0000A\u00018\u0007"}'),
        ("city='', days=1", '{"city": "", "days": 1}'),
        ("city='a\nb)</function_calls>'", '{"city": "a\\nb)</function_calls>"}'),
        ("'Paris', 3, exact=None", '{"city": "Paris", "days": 3, "exact": null}'),
        ('**{"city": "Paris"}', '{"city": "Paris"}'),
        ("", "{}"),
    ],
)
def test_python(text: str, arguments: str | None) -> None:
    if arguments is None:
        arguments = '{"days": -1.5e-3, "a": 1000, "b": 31, "c": 0.5, "d": 2}'
    call = ("get_weather", arguments)
    assert calls_of(f"<function_calls>get_weather({text})</function_calls>", "olmo3") == [call]
    for between in ("\n", ", ", "\n\n  "):
        calls = f"<function_calls>\nnow( ){between}get_weather ({text})\n</function_calls>\n"
        assert calls_of(calls, "olmo3") == [*NOW, call]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_an_empty_list_is_no_call_and_no_content(name: str, space: str) -> None:
    begin, end = LISTS[name]
    for text in (f"So.\n{begin}[{space}]{end}", f"So.\n{begin}[{space}]{end}\n"):
        message = read(text, name)
        assert (message.content, message.calls) == ("So.\n", [])
        assert_cuts_do_not_matter(text, formats_of(name))


@pytest.mark.parametrize("text", ["Say call:now{} or", "call:nope{}", "call:now is", "call:now"])
def test_a_call_without_its_tag_begins_a_line_and_names_a_tool(text: str) -> None:
    assert (read(text, "gemma4").content, read(text, "gemma4").calls) == (text, [])


def test_calls_in_python_may_be_json() -> None:
    assert calls_of('<function_calls>[{"name": "now"}]</function_calls>', "olmo3") == NOW


@pytest.mark.parametrize(
    ("before", "after"),
    [("functions.", ""), ("functions.", ":0"), ("", ":17"), ("default_api.", ""), ("tools.", "")],
)
@pytest.mark.parametrize("name", sorted({*TOOL_NAMES} - {"harmony", "kimi_k2"}))
def test_a_name_may_say_where_the_tool_is_and_which_call_it_is(
    name: str, before: str, after: str
) -> None:
    names = ("get_weather", "search.web", "now")
    text = written(name, [(f"{before}{each}{after}", {}) for each in names])
    message = read(text, name)
    assert [(call.name, call.arguments) for call in message.calls] == [
        (each, "{}") for each in names
    ]
    assert message.content == ""


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_another_tool_of_a_name_is_none_that_was_offered(name: str) -> None:
    for other in ("nowhere.now", "functions.nope", "now:x"):
        assert read(written(name, [(other, {})]), name).calls == []
    exact = tool("functions.now")
    message = parse_all(
        written(name, [("functions.now", {})]), formats_of(name), tools=[exact, tool("now")]
    )
    assert [call.name for call in message.calls] == ["functions.now"] or name in (
        *("harmony", "kimi_k2"),
    )


@pytest.mark.parametrize("quote", ["", "'", '"'])
@pytest.mark.parametrize("more", ["", " type={0}string{0}"])
def test_names_in_tags_with_any_quotes_or_none(quote: str, more: str) -> None:
    text = written("minimax_m2", [("get_weather", {"city": "a \"b\" 'c'", "days": 3}), ("now", {})])
    changed = re.sub(r'name="(\w+)"', rf"name={quote}\1{quote}", text)
    if quote:
        changed = changed.replace("city" + quote, "city" + quote + more.format(quote))
    assert calls_of(changed, "minimax_m2") == calls_of(text, "minimax_m2")


@pytest.mark.parametrize("name", ["hermes", "json", "qwen3_coder"])
def test_an_object_or_functions_in_one_kind_of_tag(name: str) -> None:
    calls = [("get_weather", {"city": "x", "days": 5}), ("now", {})]
    text = written("qwen3_coder", calls) + "\n" + written("hermes", calls)
    assert calls_of(text, name) == calls_of(text, "qwen3_coder")
    assert len(calls_of(text, name)) == 4
    assert read("a </function> b", "hermes").content == "a </function> b"


BROKEN = [
    "nope(",
    "nope(a=1",
    "nope(a='x",
    'nope(a="x, b=1',
    "nope(a=[1, 2",
    "nope(a={'b': 2,",
    "nope(a=",
    "get_weather(city='x'",
    "get_weather(city=",
]


@pytest.mark.parametrize("name", ["olmo3", "pythonic", "lfm2"])
@pytest.mark.parametrize(
    ("broken", "between"),
    [
        *product(BROKEN, ("\n", "\n\n", ",\n")),
        *product(("nope(", "nope(a=1", "get_weather(city='x'"), (", ",)),
    ],
)
def test_a_call_in_python_that_is_not_closed_leaves_the_next_one(
    name: str, broken: str, between: str
) -> None:
    begin = {"olmo3": "<function_calls>", "pythonic": "[", "lfm2": "<|tool_call_start|>["}[name]
    end = {"olmo3": "</function_calls>", "pythonic": "]", "lfm2": "]<|tool_call_end|>"}[name]
    good = "get_weather(city='Rome\nnow()', days=1)" + between + "now()"
    text = begin + broken + between + good + end
    message = read(text, name)
    made = [(call.name, call.arguments) for call in message.calls]
    assert made[-2:] == [("get_weather", '{"city": "Rome\\nnow()", "days": 1}'), *NOW]
    assert len(made) == 2 + broken.startswith("get_weather")
    assert message.content.strip(", ") == ("" if len(made) == 3 else broken.strip(", "))
    assert_cuts_do_not_matter(text, formats_of(name))


@pytest.mark.parametrize("name", ["mistral", "granite", "phi4_mini", "nemotron", "json"])
@pytest.mark.parametrize("first", ["now", "nope"])
def test_an_object_in_a_list_that_is_not_closed_leaves_the_next_one(name: str, first: str) -> None:
    text = written(name, [(first, {"a": 1}), ("now", {"a": 2})])
    text = text.replace("1}}", "1}", 1)
    assert [call.arguments for call in read(text, name).calls][-1] == '{"a": 2}'
    assert len(read(text, name).calls) == 1 + (first == "now")


@pytest.mark.parametrize("name", TAGGED_NAMES)
@pytest.mark.parametrize("space", ["", "\n\n"])
def test_an_end_of_reasoning_after_calls_is_no_content(name: str, space: str) -> None:
    calls = written(name, [("now", {})])
    for text, content in (
        (f"{calls}{space}</think>{space}", ""),
        (f"So.\n{calls}{space}</think>\n\n", "So.\n"),
        (f"</think>{space}{calls}", ""),
        (f"<think>Hm.</think>{calls}{space}</think>{space}So.", "So."),
        (f"{calls}{space}So </think> it is", "So </think> it is"),
    ):
        message = read(text, name, "think")
        assert (message.content.lstrip(), len(message.calls)) == (content, 1), text
        assert_cuts_do_not_matter(text, formats_of(name, "think"))
