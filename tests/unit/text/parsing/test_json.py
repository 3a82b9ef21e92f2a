"""JSON in pieces, against the json module; and parameters' texts as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.text.parsing.calls.parameters import as_json, parameter_types
from asyncllm.text.parsing.json_value import JsonValue, StringDecoder
from tests.support.text.parsing_texts import json_values

json_texts = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    json_values,
    st.booleans(),
    st.none() | st.integers(0, 2),
)


def scan(pieces: list[str]) -> tuple[bool, bool, int]:
    """Whether the value is done, whether it failed, and how many characters were read."""
    value = JsonValue()
    num_read = 0
    for piece in pieces:
        end = value.scan(piece, 0)
        num_read += end
        if end < len(piece):
            break
    return value.done, value.failed, num_read


@given(text=json_texts, rest=st.sampled_from(["", " ", "}", "]", ",", "x", '"', "\n1"]))
def test_a_value_ends_where_it_ends(text: str, rest: str) -> None:
    is_number = text[0] in "-0123456789"
    if is_number and rest in ("", "x"):
        rest = " "
    assert scan([text + rest]) == (True, False, len(text))
    assert scan(list(text + rest)) == (True, False, len(text))


@pytest.mark.slow
@settings(max_examples=500)
@given(data=st.data(), text=json_texts)
def test_what_is_json_is_told_as_the_json_module_does(data: st.DataObject, text: str) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        sign = data.draw(st.sampled_from(["", *'"\\{}[]:,.-+eE0127tfnu \n\x01é']))
        text = text[:at] + sign + text[at + data.draw(st.integers(0, 1)) :]
    try:
        json.loads(text, strict=False)
        is_json = True
    except ValueError:
        is_json = False
    # The space ends a number. Of the text nothing but space may follow the value.
    done, failed, num_read = scan([text + " "])
    assert (done and not text[num_read:].strip(" \n\r\t")) == is_json
    assert not (done and failed)
    assert scan(list(text + " ")) == (done, failed, num_read)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("tru,", 3),
        ('{"a" 1}', 5),
        ('{"a": 01}', 7),
        ("[1, ]", 4),
        ('{"a": 1, }', 9),
        ("[1}", 2),
        ('"\\x"', 2),
        ('"\\u12g4"', 5),
        ("-x", 1),
        ("1.e", 2),
        ("'a'", 0),
        ("{a: 1}", 1),
        ("NaN", 0),
    ],
)
def test_it_fails_at_the_first_wrong_character(text: str, end: int) -> None:
    assert scan([text]) == (False, True, end)
    assert scan(list(text)) == (False, True, end)


def test_nesting_may_be_of_any_depth() -> None:
    text = "[" * 100_000 + "]" * 100_000
    assert scan([text]) == (True, False, len(text))


escapes = st.sampled_from(
    ["\\n", "\\\\", '\\"', "\\/", "\\u00e9", "\\uD83D", "\\ude42", "\\ud83d\\ude42", "é🙂", "ab\n"]
)


@settings(max_examples=300)
@given(parts=st.lists(escapes, max_size=8), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_a_string_stands_for_what_json_says(parts: list[str], sizes: list[int]) -> None:
    text = '"' + "".join(parts) + '"'
    decoder = StringDecoder()
    found = []
    rest = text
    for size in sizes * len(text):
        found.append(decoder.push(rest[:size]))
        rest = rest[size:]
        if not rest:
            break
    expected = re.sub(
        "[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", json.loads(text, strict=False)
    )
    assert "".join(found) == expected
    assert decoder.finish() == ""


SCHEMA: dict[str, Any] = {
    "properties": {
        "plain": {"type": "integer"},
        "several": {"type": ["string", "null"]},
        "any": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/list~1a"}]},
        "enum": {"enum": ["a", 1, None]},
        "const": {"const": {"a": 1}},
        "loop": {"$ref": "#/properties/loop"},
        "odd": {"type": {"not": "a type"}},
        "nowhere": {"$ref": "#/$defs/x/y"},
        "free": True,
    },
    "$defs": {"list/a": {"type": "array"}},
}


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("plain", {"integer"}),
        ("several", {"string", "null"}),
        ("any", {"number", "array"}),
        ("enum", {"string", "integer", "null"}),
        ("const", {"object"}),
        ("loop", set()),
        ("odd", set()),
        ("nowhere", set()),
        ("free", set()),
        ("missing", set()),
    ],
)
def test_types_of_a_parameter(name: str, types: set[str]) -> None:
    assert parameter_types(SCHEMA, name) == types


@pytest.mark.parametrize("schema", [True, {}, {"properties": []}, None])
def test_a_schema_may_say_nothing(schema: Any) -> None:
    assert parameter_types(schema, "a") == frozenset()


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        (" 12 ", {"integer"}, "12"),
        ("1e400", {"number"}, "1e400"),
        ("123456789012345678901234567890", {"integer"}, "123456789012345678901234567890"),
        ("2.0", {"integer"}, "2.0"),
        ("2.5", {"integer"}, '"2.5"'),
        ("2", {"number"}, "2"),
        ("TRUE", {"boolean"}, "true"),
        ("false", {"string", "boolean"}, "false"),
        ("None", {"string", "null"}, "null"),
        ("5", {"string", "null"}, '"5"'),
        ('"a"', {"string", "null"}, '"\\"a\\""'),
        ('{"A": [1, "X"]}', {"object"}, '{"A": [1, "X"]}'),
        ("[1]", {"object"}, '"[1]"'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("NaN", {"number"}, '"NaN"'),
        ("[" * 5000, {"array"}, json.dumps("[" * 5000)),
        ("", {"integer"}, '""'),
    ],
)
def test_a_text_as_json_of_a_type(text: str, types: set[str], expected: str) -> None:
    assert as_json(text, frozenset(types)) == expected
