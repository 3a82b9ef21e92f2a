"""Schemas of every common kind: whatever random choices come to is valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import JsonObject, JsonSchema
from tests.support.text.grammar_sampling import (
    accepts,
    check_valid,
    compiled,
    count_allowed,
    follow,
    sample,
)
from tests.support.text.grammar_schemas import SCHEMAS, closed

SEEDS = range(8)


def test_there_are_enough() -> None:
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_finished_output_is_valid(name: str) -> None:
    grammar = compiled(JsonSchema(SCHEMAS[name]))
    outputs = [sample(grammar, seed, most=400) for seed in SEEDS]
    finished = [output for output in outputs if output.finished]
    assert finished
    for output in finished:
        check_valid(SCHEMAS[name], output.text)
        assert accepts(grammar, output.text)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_prefix_can_go_on_as_it_did(name: str) -> None:
    """Also when the steps are taken back in between."""
    grammar = compiled(JsonSchema(SCHEMAS[name]))
    tokens = sample(grammar, seed=3, most=60).tokens
    matcher = grammar.matcher()
    for length in range(len(tokens) + 1):
        assert count_allowed(matcher, tokens[length:]) == len(tokens) - length
        if length < len(tokens):
            assert matcher.accept(tokens[length])
    assert matcher.rollback(len(tokens))
    follow(matcher, tokens)


def test_different_seeds_differ() -> None:
    grammar = compiled(JsonSchema(SCHEMAS["recursion"]))
    assert len({sample(grammar, seed).text for seed in range(8)}) > 4


def test_any_object() -> None:
    grammar = compiled(JsonObject())
    for text in ("{}", '{"a": [1, {"b": null}]}', '{\n  "ü": "x\\n\\u0001"\n}'):
        assert accepts(grammar, text)
    for text in ("[]", "1", '{"a"}', "{'a': 1}", '{"a": 1,}', '{"a": 01}', '"{}"', "{} "):
        assert not accepts(grammar, text)


#: (schema, valid texts, invalid ones): what the grammar admits, not just what it comes up with.
EXACT: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "pattern is a search": ({"type": "string", "pattern": "b"}, ["b", "abc"], ["", "a"]),
    "anchors inside alternatives": (
        {"type": "string", "pattern": "^(a|b)|c$"}, ["a", "bx", "xc"], ["x", "cx", ""]),
    "dot is no line end": ({"type": "string", "pattern": "^.$"}, ["a", "é"], ["\n", "ab"]),
    "digits are ASCII": ({"type": "string", "pattern": r"^\d$"}, ["7"], ["٣"]),
    "length counts characters": ({"type": "string", "maxLength": 2}, ["", "🙂🙂"], ["abc"]),
    "not pattern": ({"type": "string", "not": {"pattern": "a.c"}}, ["ab", ""], ["xabcx"]),
    "integers": ({"type": "integer"}, [0, -5, 12345678901234567890], [1.5, "1", None, True]),
    "booleans are no numbers": ({"enum": [1]}, [1], [True]),
    "exclusive": ({"type": "number", "exclusiveMinimum": 1.5}, [1.51, 2], [1.5, 1, -2]),
    "bounds with signs": (
        {"type": "number", "minimum": -10.5, "maximum": -2},
        [-10.5, -2, -3.25, -10], [-1.99, -10.51, 2, 0, -11]),
    "around zero": (
        {"type": "number", "minimum": -0.5, "maximum": 0.5}, [0, -0.5, 0.5, 0.125], [0.51, -1]),
    "decimal multiples": ({"type": "number", "multipleOf": 0.01}, [0.07, 1, 19.99], [0.005]),
    "all of integers and numbers": (
        {"allOf": [{"type": "number"}, {"type": "integer", "minimum": 3}]}, [3, 4], [2, 3.5]),
    "one of excludes both": (
        {"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]}, [1, 2.5], [3, 1.5]),
    "if without then": ({"type": "integer", "if": {"minimum": 5}, "else": False}, [5, 9], [4]),
    "if without else": (
        {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}}, [3, 6], [7]),
    "additional properties": (
        {"type": "object", "properties": {"a": True}, "additionalProperties": {"type": "null"}},
        [{}, {"a": 1}, {"a": 1, "b": None}], [{"b": 1}]),
    "pattern properties and the rest": (
        {"type": "object", "patternProperties": {"^x": {"type": "null"}},
         "additionalProperties": False},
        [{}, {"xa": None}], [{"a": None}, {"xa": 1}]),
    "not of an object": (
        {"type": "object", "not": {"properties": {"a": {"type": "null"}}, "required": ["a"]}},
        [{}, {"a": 1}, {"b": None}], [{"a": None}]),
    "not any additional": (
        {"type": "object", "properties": {"a": True}, "not": {"additionalProperties": False}},
        [{"b": 1}, {"a": 1, "b": 1}], [{}]),
    "not an array of integers": (
        {"type": "array", "not": {"items": {"type": "integer"}}}, [["a"], [1, "a"]], [[], [1]]),
    "contains between": (
        {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 3},
        [[1, 1], [1, 0, 1, 1]], [[1], [1, 1, 1, 1]]),
    "unevaluated items": (
        {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False},
        [[], [None]], [[1], [None, 1]]),
    "unevaluated through a choice": (
        {"type": "object", "unevaluatedProperties": False, "anyOf": [
            {"properties": {"a": {"const": 1}}, "required": ["a"]},
            {"properties": {"b": {"const": 2}}, "required": ["b"]}]},
        [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}], [{}, {"a": 1, "b": 3}, {"c": 1, "a": 1}]),
    "dynamic references": (
        {"$id": "https://example.org/list", "$ref": "base", "$defs": {
            "item": {"$dynamicAnchor": "T", "type": "string"},
            "base": {"$id": "base", "type": "array", "items": {"$dynamicRef": "#T"},
                     "$defs": {"any": {"$dynamicAnchor": "T"}}}}},
        [[], ["a"]], [[1]]),
    "const in any form of an array": (
        {"const": [1, {"a": None}]}, [[1, {"a": None}]], [[1], [1, {}], [1, {"a": None}, 2]]),
    "not a constant object": (
        {"type": "object", "not": {"const": {"a": 1}}},
        [{}, {"a": 2}, {"a": 1, "b": 1}, {"b": 1}], [{"a": 1}]),
    "neither multiple nor fraction": (
        {"type": "number", "not": {"anyOf": [{"multipleOf": 1}, {"maximum": 3}]}},
        [3.5], [4, 2.5]),
    "at least two": (
        {"type": "object", "properties": dict.fromkeys("abcd", True), "minProperties": 2,
         "additionalProperties": {"type": "null"}},
        [{"a": 1, "c": 1}, dict.fromkeys("abcd", 1), {"d": 1, "x": None},
         {"a": 1, "b": 1, "c": 1, "x": None, "y": None}],
        [{}, {"a": 1}, {"x": None}]),
    "at most two": (
        {"type": "object", "properties": dict.fromkeys("abc", True), "maxProperties": 2},
        [{}, {"a": 1, "c": 1}, {"b": 1, "x": 1}, {"x": 1, "y": 1}],
        [{"a": 1, "b": 1, "c": 1}, {"a": 1, "x": 1, "y": 1}]),
    "dependent on several": (
        {"type": "object", "dependentRequired": {"a": ["b"], "c": ["d"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}, {"a": 1, "b": 1, "c": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_what_is_admitted(name: str) -> None:
    schema, valid, invalid = EXACT[name]
    grammar = compiled(JsonSchema(schema))
    validator = jsonschema.Draft202012Validator(schema)
    for value in valid:
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in invalid:
        assert not accepts(grammar, json.dumps(value, ensure_ascii=False)), value
        if name not in ("digits are ASCII",):
            assert not validator.is_valid(value), "the test is wrong"


def optional(letter: str, count: int) -> dict[str, Any]:
    """An object that may have so many members."""
    return closed({f"{letter}{index}": True for index in range(count)}, required=[])


#: What is refused: the keyword that the message names, and the place.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "look-behind": ({"pattern": "(?<=a)b"}, "pattern", "#"),
    "back-reference": (closed({"x": {"pattern": r"(a)\1"}}), "pattern", "#/properties/x"),
    "word boundary": ({"items": {"pattern": r"\bfoo"}}, "pattern", "#/items"),
    "malformed pattern": ({"pattern": "a("}, "pattern", "#"),
    "anchor repeated": ({"pattern": "(^a)*b"}, "pattern", "#"),
    "other document": ({"$ref": "https://example.org/x.json"}, "$ref", "#"),
    "dangling reference": ({"$ref": "#/$defs/none"}, "$ref", "#"),
    "reference to itself": ({"$ref": "#"}, "$ref", "#"),
    "reference to itself by a choice": ({"anyOf": [{"$ref": "#"}, True]}, "$ref", "#"),
    "unknown format": ({"type": "string", "format": "zip-code"}, "format", "#"),
    "unique items": (
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems", "#"),
    "not unique items": ({"type": "array", "not": {"uniqueItems": True}}, "uniqueItems", "#/not"),
    "not multiple": ({"type": "integer", "not": {"multipleOf": 3}}, "multipleOf", "#/not"),
    "large multiple": ({"type": "integer", "multipleOf": 2**31 - 1}, "multipleOf", "#"),
    "not a format": ({"type": "string", "not": {"format": "date"}}, "format", "#/not"),
    "many keys without names": ({"type": "object", "minProperties": 3}, "minProperties", "#"),
    "not unevaluated": (
        {"type": "object", "not": {"unevaluatedProperties": False}},
        "unevaluatedProperties", "#/not"),
    "older recursion": ({"items": {"$recursiveRef": "#"}}, "$recursiveRef", "#/items"),
    "unknown dialect": ({"$schema": "https://example.org/meta"}, "$schema", "#"),
    "1000 optional properties": (
        closed({"a/b": closed({f"p{index}": True for index in range(1000)}, required=[])}),
        "properties", "#/properties/a~1b"),
    "alternatives with 1000 optional properties": (
        {"items": {"anyOf": [optional(char, 340) for char in "abc"]}}, "anyOf", "#/items"),
    "alternatives that are told apart too late": (
        {"oneOf": [optional(char, 550) | {"required": [f"{char}549"]} for char in "ab"]},
        "oneOf", "#"),
    "alternatives by a reference": (
        {"$defs": {"one": {"anyOf": [optional("a", 550), optional("b", 550)]}},
         "properties": {"x": {"$ref": "#/$defs/one"}}}, "anyOf", "#/$defs/one"),
    "malformed type": ({"type": "text"}, "type", "#"),
    "malformed minimum": ({"type": "number", "minimum": "3"}, "minimum", "#"),
    "malformed properties": ({"type": "object", "properties": [1]}, "properties", "#"),
    "malformed property": (
        {"type": "object", "properties": {"a": "string"}}, "properties", "#"),
    "malformed required": ({"type": "object", "required": "a"}, "required", "#"),
    "malformed enum": ({"enum": "a"}, "enum", "#"),
    "malformed choice": ({"anyOf": []}, "anyOf", "#"),
    "malformed items": ({"type": "array", "items": 3}, "items", "#"),
    "malformed length": ({"type": "string", "maxLength": -1}, "maxLength", "#"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str) -> None:
    schema, keyword, path = REFUSED[name]
    with pytest.raises(BadRequest) as caught:
        compiled(JsonSchema(schema))
    assert f"schema {path}: {keyword!r}" in caught.value.message
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "pattern": "^a$", "not": {"const": "a"}},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "integer", "multipleOf": 7, "minimum": 50, "maximum": 55},
        {"enum": []},
        {"type": "number", "multipleOf": 2, "not": {"type": "integer"}},
    ],
)
def test_what_admits_nothing_is_refused(schema: Any) -> None:
    with pytest.raises(BadRequest, match="is valid against it"):
        compiled(JsonSchema(schema))
