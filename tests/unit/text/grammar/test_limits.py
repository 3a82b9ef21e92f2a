"""Schemas made to hurt: refused, or compiled, within a bounded time; never a crash."""

from __future__ import annotations

import time
from typing import Any

import pytest

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import JsonSchema, Regex
from tests.support.text.grammar_sampling import compiled, sample
from tests.support.text.grammar_schemas import closed

#: Much more than any takes on a quiet machine (1.5 s); less than a hang.
SECONDS = 15.0


def nested(depth: int, keyword: str) -> Any:
    schema: Any = {"type": "object"}
    for _ in range(depth):
        schema = {keyword: [schema] if keyword.endswith("Of") else schema}
    return schema


def deep_properties(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def options(keyword: str, count: int) -> list[Any]:
    return [{keyword: [f"{side}{index}" for side in "ab"]} for index in range(count)]


def references(keyword: str, count: int) -> Any:
    definitions: dict[str, Any] = {
        f"d{index}": {keyword: [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(count)
    }
    return {"$defs": {**definitions, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def chain(count: int) -> Any:
    definitions: dict[str, Any] = {
        f"d{index}": closed({"x": {"$ref": f"#/$defs/d{index + 1}"}}) for index in range(count)
    }
    return {"$defs": {**definitions, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


TOO_MUCH: dict[str, Any] = {
    "10,000 levels": deep_properties(10_000),
    "10,000 negations": nested(10_000, "not"),
    "10,000 conjunctions": nested(10_000, "allOf"),
    "a megabyte of texts": {"enum": ["x" * 1000] * 1100},
    "a megabyte in one text": {"const": "x" * 1_100_000},
    "a million of values": {"enum": list(range(1_000_000))},
    "20,000 properties": {"properties": {f"p{index}": True for index in range(20_000)}},
    "3000 open properties": closed(
        {f"p{index}": {"type": "string"} for index in range(3000)}, required=[]),
    "2 ** 20 combinations": {"type": "object", "allOf": [
        {"anyOf": [{"required": [f"a{index}"]}, {"required": [f"b{index}"]}]}
        for index in range(20)]},
    "2 ** 30 references": references("anyOf", 30),
    "deep rules": chain(1500),
    "a long tuple": {"type": "array", "prefixItems": [{"const": n} for n in range(4000)]},
    "counting to a million": {"type": "array", "contains": {"type": "null"},
                              "maxContains": 1_000_000},
    "a huge multiple": {"type": "integer", "multipleOf": 2_147_483_648},
    "a huge integer": {"const": 10**5000},
    "not a number": {"const": float("nan")},
    "not JSON": {"const": object()},
    "a key that is no text": {"properties": {1: True}},
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_quickly(name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(BadRequest):
        compiled(JsonSchema(TOO_MUCH[name]))
    assert time.monotonic() - begun < SECONDS


MUCH: dict[str, Any] = {
    "60 levels": deep_properties(60),
    "60 negations": nested(60, "not"),
    "60 conjunctions": nested(60, "allOf"),
    "60 choices": nested(60, "oneOf"),
    "1000 required properties": closed({f"p{index}": True for index in range(1000)}),
    "900 optional properties": {"properties": {f"p{index}": True for index in range(900)}},
    "500 properties": closed({f"p{index}": True for index in range(500)}, required=[]),
    "alternatives with 900 optional properties": {
        "anyOf": [closed({f"{char}{index}": True for index in range(300)}, required=[])
                  for char in "abc"]},
    "alternatives told apart by their kinds": {
        "anyOf": [closed({"kind": {"const": char}, **{f"p{index}": True for index in range(500)}},
                         required=["kind"]) for char in "abcdef"]},
    "alternatives told apart by what they require": {
        "anyOf": [closed({char: True, **{f"{char}{index}": True for index in range(500)}},
                         required=[char]) for char in "abcdef"]},
    "200 tools": {
        "anyOf": [closed({"tool": {"const": f"t{tool}"},
                          **{f"a{tool}_{index}": {"type": "integer"} for index in range(8)}},
                         required=["tool"]) for tool in range(200)]},
    "5000 texts": {"enum": [f"value {index}" for index in range(5000)]},
    "2000 numbers that are not": {"type": "integer", "not": {"enum": list(range(2000))}},
    "2 ** 30 references": references("allOf", 30),
    "20 of which one": {"oneOf": [
        {"type": "object", "required": [f"p{index}"], "properties": {
            f"p{index}": {"type": "string"}, "q": {"type": "integer"}}} for index in range(20)]},
    "50 kinds": {"oneOf": [closed({"kind": {"const": f"k{index}"}, "v": {"type": "null"}})
                           for index in range(50)]},
    "a long array": {"type": "array", "minItems": 1_000_000},
    "an array of any length": {"type": "array", "maxItems": 2**31 - 1},
    "a long string": {"type": "string", "minLength": 2**31 - 1},
    "repetitions of repetitions": {"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"},
    "backtracking": {"type": "string", "pattern": "^(a+)+$"},
    "an exponential automaton": {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"},
    "a sparse search": {"type": "string", "pattern": "(a|b)*a(a|b){200}c"},
    "long and patterned": {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "minLength": 500},
    "a chain of references": chain(60),
}  # fmt: skip


@pytest.mark.parametrize("name", MUCH)
def test_much_is_compiled(name: str) -> None:
    begun = time.monotonic()
    grammar = compiled(JsonSchema(MUCH[name]))
    for seed in range(2):
        assert sample(grammar, seed, most=60)
    assert time.monotonic() - begun < SECONDS


def test_a_mask_that_costs_too_much_is_an_error_of_its_row() -> None:
    """Patterns whose common texts need an automaton of thousands of billions of states."""
    patterns = [f"{char}.{{{gap}}}{char}" for gap, char in enumerate("abcdefghij", 20)]
    schema = {"type": "string", "allOf": [{"not": {"pattern": one}} for one in patterns]}
    try:
        grammar = compiled(JsonSchema(schema))
    except BadRequest:
        return
    matcher = grammar.matcher()
    for token in sample(compiled(Regex('"[a-z]{300}')), 1).tokens:
        if not matcher.accept(token):
            break
    assert matcher.error is None or "too many" in matcher.error or "satisfy" in matcher.error
