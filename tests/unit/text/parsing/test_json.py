"""Values in JSON and Python, in pieces, against those languages; parameters' texts as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.text.parsing.calls.typed import as_json, parameter_types
from asyncllm.text.parsing.literal import Literal
from asyncllm.text.parsing.source import Source
from tests.support.text.parsing_texts import json_values

json_texts = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    json_values,
    st.booleans(),
    st.none() | st.integers(0, 2),
)


def read_value(pieces: Sequence[str]) -> tuple[str, bool, int]:
    """What a reader makes of a text in pieces: JSON, whether it is whole, how much was read."""
    written: list[str] = []
    whole, num_read = read_into(written, pieces)
    return "".join(written), whole, num_read


def read_into(written: list[str], pieces: Sequence[str]) -> tuple[bool, int]:
    source = Source()
    steps = Literal(source, written.append, of_call=True).read()
    try:
        for piece in pieces:
            source.feed(piece)
            next(steps)
        source.end()
        next(steps)
    except StopIteration as end:
        return end.value, source.consumed
    raise AssertionError("the end of the text is waited for")


@given(text=json_texts, rest=st.sampled_from(["", " ", "}", "]", ",", '"', "\n1", "x"]))
def test_json_comes_out_as_it_is_and_ends_where_it_ends(text: str, rest: str) -> None:
    if text[0] not in '{["':  # only something else ends a word
        rest = rest if rest in ("", "}", "]", ",") else ""
    elif text + rest == '"""':  # which opens one of Python's strings
        rest = ""
    assert read_value([text + rest]) == (text, True, len(text))
    assert read_value(text + rest) == (text, True, len(text))


SIGNS = ["", *"'\"\\{}()[]:=,.*-+eE0127tfnu \n\x01é", '"""', "**{"]


@pytest.mark.slow
@settings(max_examples=500)
@given(data=st.data(), text=json_texts | json_values.map(repr))
def test_whatever_comes_is_made_json_wherever_it_ends(data: st.DataObject, text: str) -> None:
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        sign = data.draw(st.sampled_from(SIGNS))
        text = text[:at] + sign + text[at + data.draw(st.integers(0, 1)) :]
    text = text[: data.draw(st.integers(0, len(text)))]
    found = read_value([text])
    json.loads(found[0], parse_constant=lambda name: pytest.fail(name))
    assert read_value(text) == found
    try:
        value = json.loads(text.strip(), parse_constant=lambda name: 1 / 0)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, ZeroDivisionError):
        return
    assert json.loads(read_value([text.strip()])[0]) == value


@given(value=json_values, name=st.from_regex(r"[a-z]\w*", fullmatch=True))
def test_python_stands_for_what_it_says(value: Any, name: str) -> None:
    for text, expected in (
        (f"({name}={value!r})", {name: value}),
        (f"({value!r}, )", {"0": value}),
        (f"[({value!r},), ({value!r}), ()]", [[value], value, []]),
    ):
        written, whole, num_read = read_value([text])
        assert (json.loads(written), whole, num_read) == (expected, True, len(text))


def test_nesting_may_be_of_any_depth() -> None:
    text = "[" * 100_000 + "]" * 100_000
    assert read_value([text]) == (text, True, len(text))
    assert read_value([text[:150_000]]) == (text, False, 150_000)


escapes = st.sampled_from(
    ["\\n", "\\\\", '\\"', "\\/", "\\u00e9", "\\uD83D", "\\ude42", "\\ud83d\\ude42", "é🙂", "ab\n"]
)


@settings(max_examples=300)
@given(parts=st.lists(escapes, max_size=8), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_each_piece_of_a_string_stands_for_what_json_says(
    parts: list[str], sizes: list[int]
) -> None:
    """So arguments within a string can be read as it comes."""
    text = '"' + "".join(parts) + '"'
    ends = list(accumulate(sizes * len(text)))
    written: list[str] = []
    read_into(written, [text[start:end] for start, end in zip([0, *ends], ends, strict=False)])
    expected = re.sub(
        "[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", json.loads(text, strict=False)
    )
    assert (
        "".join("" if piece == '"' else json.loads(f'"{piece}"') for piece in written) == expected
    )


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
        ("{'a': 1}", {"object"}, '{"a": 1}'),
        ("{'a': 1}", {"string", "object"}, '{"a": 1}'),
        ("{'a': (True, None)}\n", {"object"}, '{"a": [true, null]}'),
        ("('a', \"b\")", {"array"}, '["a", "b"]'),
        ("[a b, 1]", {"array"}, '["a b", 1]'),
        ("[a b, 1]", {"string", "array"}, '"[a b, 1]"'),
        ("[1], [2]", {"array"}, '"[1], [2]"'),
        ('"5"', {"integer"}, "5"),
        ("'True'", {"boolean"}, "true"),
        ("0x10", {"integer"}, "16"),
        ("0x10", {"string", "integer"}, '"0x10"'),
        ("007", {"integer"}, '"007"'),
        ("NaN", {"number"}, '"NaN"'),
        ("NaN", {"number", "null"}, "null"),
        ("nan", {"string", "null"}, '"nan"'),
        ("[" * 5000, {"array"}, json.dumps("[" * 5000)),
        ("", {"integer"}, '""'),
    ],
)
def test_a_text_as_json_of_a_type(text: str, types: set[str], expected: str) -> None:
    assert as_json(text, frozenset(types)) == expected
