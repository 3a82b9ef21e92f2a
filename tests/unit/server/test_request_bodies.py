"""From the bytes of a body to a Struct: equal keys, floats for integers, and how much is taken."""

from __future__ import annotations

import gc
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.parse import MAX_PARTS, MAX_VALUES, parse
from asyncllm.server.native.requests import DetokenizeRequest
from asyncllm.server.ollama.requests import OllamaChatRequest
from asyncllm.server.openai.requests import CompletionRequest


class Inner(msgspec.Struct):
    a: Any = None
    text: str = "default"


class Outer(msgspec.Struct):
    """With fields of every kind that requests have."""

    a: Any = None
    b: str | None = None
    inner: Inner | None = None
    many: list[Inner | str] | None = None
    ids: list[int | str] | None = None
    bias: dict[int, float] | None = None


# -- equal keys ------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "inner", "many", "text", "", 'x"', "\\", "\\u0022", "é"])
TEXTS = st.one_of(NAMES, st.text(st.sampled_from('"\\u02aé'), max_size=8), st.just("long " * 40))
PAIRS = st.recursive(
    st.one_of(TEXTS, st.integers(-5, 5), st.none(), st.booleans()),
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(NAMES, inner), max_size=4),
    max_leaves=12,
)
ITEMS = st.lists(st.tuples(NAMES, PAIRS), max_size=5)


def written(value: Any, ascii_only: bool, hide: bool) -> str:
    """JSON of a value whose objects are lists of pairs, and may have equal keys."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=ascii_only)
        return text.replace('\\"', "\\u0022") if hide and "\\\\" not in text else text
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        pairs = (
            f"{written(k, ascii_only, hide)}: {written(v, ascii_only, hide)}" for k, v in value
        )
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(item, ascii_only, hide) for item in value) + "]"
    return json.dumps(value)


def has_equal_keys(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    if value and isinstance(value[0], tuple):
        keys = [key for key, _ in value]
        return len(set(keys)) < len(keys) or any(has_equal_keys(item) for _, item in value)
    return any(map(has_equal_keys, value))


def problem_of(text: bytearray) -> str:
    try:
        parse(text, Outer)
    except BadRequest as error:
        return error.message
    return ""


@given(ITEMS, st.booleans(), st.booleans())
def test_equal_keys_are_found_wherever_they_are(
    items: list[tuple[str, Any]], ascii_only: bool, hide: bool
) -> None:
    text = bytearray((written(items, ascii_only, hide) if items else "{}").encode())
    for padded in (text, text + b" " * 9000):  # long texts are parsed without garbage collections
        assert ("given twice" in problem_of(padded)) == has_equal_keys(items)


@pytest.mark.parametrize(
    "text",
    [
        '{"inner": {"a": 1, "a": 2}}',
        '{"many": ["x", {"text": "y", "a": 1, "a": 1}]}',
        '{"inner": {"text": "default", "text": "default"}}',
        '{"bias": {"1": 1, "1": 2}}',
        '{"ids": [1, 2], "a": {"x": 1, "x": 1}}',
        '{"a": [1, {"x": 1, "x": 1}]}',
        '{"b": "\\u0022", "b": "a"}',
    ],
)
@pytest.mark.parametrize("padding", ["", " " * 9000])
def test_equal_keys_of_structs(text: str, padding: str) -> None:
    with pytest.raises(BadRequest, match="given twice"):
        parse(bytearray((text + padding).encode()), Outer)


def test_equal_keys_among_many() -> None:
    keys = ", ".join(f'"{i}": 0' for i in range(20_000))
    with pytest.raises(BadRequest) as caught:
        parse(bytearray(f'{{"a": {{{keys}, "19999": 1}}}}'.encode()), Outer)
    assert caught.value.param == "19999"


def test_equal_keys_of_a_large_body() -> None:
    with pytest.raises(BadRequest, match="given twice"):
        parse(bytearray(b'{"a": 1, "a": 2, "b": "%b"}' % (b"long" * 100_000)), Outer)


def test_all_fields_come_with_the_struct() -> None:
    body: dict[str, Any] = {"a": 1, "bias": {"1": 2}, "ids": [1, "x"], "many": ["x", {"a": "y"}]}
    for more in ({}, {"typo": 1}, {"b": None}, {"inner": {"typo": 1}}):
        fields = {**body, **more}
        assert parse(bytearray(json.dumps(fields).encode()), Outer)[1] == fields


# -- floats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "path", "value"),
    [
        (ChatRequest, '{"messages": [], "max_tokens": 16.0}', ("max_tokens",), 16),
        (ChatRequest, '{"messages": [], "seed": -3e2, "n": 2.0}', ("seed",), -300),
        (CompletionRequest, '{"prompt": [1.0, 2, 3.0]}', ("prompt",), [1, 2, 3]),
        (CompletionRequest, '{"prompt": [[1.0], [2.0]]}', ("prompt",), [[1], [2]]),
        (DetokenizeRequest, '{"tokens": [5.0]}', ("tokens",), [5]),
        (OllamaChatRequest, '{"options": {"num_predict": 5.0}}', ("options", "num_predict"), 5),
    ],
)
def test_integers_written_as_floats(
    kind: type[msgspec.Struct], text: str, path: tuple[str, ...], value: Any
) -> None:
    found: Any = parse(bytearray(text.encode()), kind)[0]
    for name in path:
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_integers_written_as_floats_in_large_bodies() -> None:
    body: dict[str, Any] = {"prompt": "long " * 100_000, "max_tokens": 16.0}
    asked, _ = parse(bytearray(json.dumps(body).encode()), CompletionRequest)
    assert type(asked.max_tokens) is int
    body["prompt"] = [1.0] * 100_000  # but there is no time to look at each of so many
    with pytest.raises(BadRequest) as caught:
        parse(bytearray(json.dumps(body).encode()), CompletionRequest)
    assert caught.value.param == "prompt[0]"


def test_only_integer_fields_are_converted() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"minimum": 1.0}}}
    body = {"messages": [{"role": "user", "content": "1.0"}], "tools": [tool], "top_k": 5.0}
    asked, fields = parse(bytearray(json.dumps(body | {"temperature": 1.0}).encode()), ChatRequest)
    assert (asked.top_k, asked.temperature) == (5, 1.0)
    assert asked.tools is not None
    assert type(asked.tools[0]["function"]["parameters"]["minimum"]) is float
    assert fields["tools"] == [tool]


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"max_tokens": 1.5}', "max_tokens"),
        ('{"n": 2.0, "max_tokens": 1.5}', "max_tokens"),
        ('{"max_tokens": "16"}', "max_tokens"),
        ('{"max_tokens": "16.0"}', "max_tokens"),
        ('{"max_tokens": 0.0}', "max_tokens"),
        ('{"n": 1e300}', "n"),
        ('{"stop_token_ids": [1.0, 2.5]}', "stop_token_ids[1]"),
        ('{"model": 1.0}', "model"),
        ('{"stream": 1.0}', "stream"),
        ('{"n": 1.0, "top_k": 1, "top_k": 2}', "top_k"),
        ('{"n": 1.0, "n": 1}', "n"),
    ],
)
def test_values_that_are_not_integers_are_refused_by_name(text: str, param: str) -> None:
    body = bytearray(f'{{"messages": [], {text[1:]}'.encode())
    with pytest.raises(BadRequest) as caught:
        parse(body, ChatRequest)
    assert caught.value.param == param


# -- how much --------------------------------------------------------------------------------------

MANY = MAX_PARTS + 1
TOO_MANY = {
    "arrays": b"[]," * MANY,
    "objects": b"{}," * MANY,
    "nested": b"[[[[[[[[]]]]]]]]," * (MANY // 8 + 1),
    "strings": b'"",' * MANY,
    "escapes": b'"\\\\",' * MANY,
    "keys": b'{"a":1},' * (MANY // 2 + 1),
    "numbers": b"1," * (MAX_VALUES + 1),
}


@pytest.mark.parametrize("values", TOO_MANY.values(), ids=TOO_MANY)
@pytest.mark.parametrize("field", ["unknown", "metadata"])
def test_too_many_objects(values: bytes, field: str) -> None:
    body = bytearray(b'{"messages": [], "%b": {"": [%b0]}}' % (field.encode(), values))
    with pytest.raises(BadRequest, match="more than"):
        parse(body, ChatRequest)


LONG = {
    "ids": list(range(1_000_000)),
    "code": "x = [[1, 2], {'a': [3]}]\n" * 200_000,
    "quoted": '{"a": ["\\", 1]}' * 150_000,
    "texts": ["text"] * 100_000,
}


@pytest.mark.parametrize("prompt", LONG.values(), ids=LONG)
def test_long_prompts_are_fine(prompt: Any) -> None:
    body = bytearray(json.dumps({"prompt": prompt, "stop": ["a"]}).encode())
    assert len(body) > 2_000_000 or isinstance(prompt, list)
    asked, fields = parse(body, CompletionRequest)
    assert asked.prompt == prompt
    assert fields == {"prompt": prompt, "stop": ["a"]}
    assert gc.isenabled()
