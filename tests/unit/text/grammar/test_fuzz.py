"""Random schemas of all keywords: outputs are valid, and what is invalid is not admitted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import JsonSchema
from tests.support.text.grammar_sampling import accepts, check_valid, compiled, sample

NAMES = ["a", "b", "ab", "c"]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    1.5,
    "",
    "a",
    "ab",
    "abc",
    [],
    [1],
    {},
    {"a": 1},
]
PATTERNS = ["a", "^a", "b$", "^[ab]*$", "^.{2}$"]
REFERENCES = ["#/$defs/x", "#/$defs/y"]


class RandomSchemas:
    """Schemas whose keywords meet in every combination."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)

    def document(self) -> dict[str, Any]:
        schema = self._object_of_keywords(3)
        return {**schema, "$defs": {name: self.schema(1) for name in "xy"}}

    def schema(self, depth: int) -> Any:
        if self._rng.random() < 0.1:
            return self._rng.random() < 0.7
        return self._object_of_keywords(depth)

    def _object_of_keywords(self, depth: int) -> dict[str, Any]:
        makers: dict[str, Callable[[int], Any]] = {**_LEAVES, **(_INNER if depth else {})}
        count = self._rng.choice([1, 1, 2, 2, 3, 4])
        chosen = self._rng.sample(sorted(makers), count)
        return {keyword: self._make(makers[keyword], depth - 1) for keyword in chosen}

    def _make(self, maker: Callable[..., Any], depth: int) -> Any:
        return maker(self, depth)

    def pick(self, values: list[Any]) -> Any:
        return self._rng.choice(values)

    def several(self, values: list[Any], most: int = 3) -> list[Any]:
        return self._rng.sample(values, self._rng.randint(1, most))

    def list_of(self, depth: int) -> list[Any]:
        return [self.schema(depth) for _ in range(self._rng.randint(1, 3))]


_TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
_LEAVES: dict[str, Any] = {
    "type": lambda make, depth: make.pick([make.pick(_TYPES), make.several(_TYPES)]),
    "enum": lambda make, depth: make.several(VALUES, 5),
    "const": lambda make, depth: make.pick(VALUES),
    "minimum": lambda make, depth: make.pick([-1, 0, 1.5, 2]),
    "maximum": lambda make, depth: make.pick([0, 1, 2.5, 3]),
    "exclusiveMinimum": lambda make, depth: make.pick([-1, 0, 1]),
    "exclusiveMaximum": lambda make, depth: make.pick([1, 2, 3.5]),
    "multipleOf": lambda make, depth: make.pick([1, 2, 0.5]),
    "minLength": lambda make, depth: make.pick([0, 1, 2]),
    "maxLength": lambda make, depth: make.pick([0, 1, 2, 5]),
    "pattern": lambda make, depth: make.pick(PATTERNS),
    "minItems": lambda make, depth: make.pick([0, 1, 2]),
    "maxItems": lambda make, depth: make.pick([0, 1, 2, 3]),
    "required": lambda make, depth: make.several(NAMES, 2),
    "minProperties": lambda make, depth: make.pick([0, 1, 2]),
    "maxProperties": lambda make, depth: make.pick([0, 1, 2]),
    "dependentRequired": lambda make, depth: {make.pick(NAMES): make.several(NAMES, 2)},
    "$ref": lambda make, depth: make.pick(REFERENCES),
}
_INNER: dict[str, Any] = {
    "properties": lambda make, depth: {n: make.schema(depth) for n in make.several(NAMES)},
    "patternProperties": lambda make, depth: {
        pattern: make.schema(depth) for pattern in make.several(PATTERNS, 2)
    },
    "additionalProperties": lambda make, depth: make.schema(depth),
    "unevaluatedProperties": lambda make, depth: make.pick([False, False, make.schema(depth)]),
    "propertyNames": lambda make, depth: make.schema(depth),
    "dependentSchemas": lambda make, depth: {make.pick(NAMES): make.schema(depth)},
    "items": lambda make, depth: make.schema(depth),
    "prefixItems": lambda make, depth: make.list_of(depth),
    "unevaluatedItems": lambda make, depth: make.pick([False, False, make.schema(depth)]),
    "contains": lambda make, depth: make.schema(depth),
    "minContains": lambda make, depth: make.pick([0, 1, 2]),
    "maxContains": lambda make, depth: make.pick([1, 2]),
    "allOf": lambda make, depth: make.list_of(depth),
    "anyOf": lambda make, depth: make.list_of(depth),
    "oneOf": lambda make, depth: make.list_of(depth),
    "not": lambda make, depth: make.schema(depth),
    "if": lambda make, depth: make.schema(depth),
    "then": lambda make, depth: make.schema(depth),
    "else": lambda make, depth: make.schema(depth),
}

INSTANCES: list[Any] = [
    *VALUES,
    *([1, 2], [1, "a"], [None, 1, 2], [[], {}], ["a", "ab", "abc"]),
    *({"a": None}, {"a": "a", "b": 2}, {"b": 1}, {"ab": 1.5}, {"a": {}, "ab": []}),
    *({"c": 0}, {"a": 1, "b": 1, "ab": 1}, {"zz": True}),
]


@pytest.mark.parametrize("block", range(12))
def test_random_schemas(block: int) -> None:
    """Twenty-five schemas that admit something; each with some outputs and with all instances."""
    checked = seed = 0
    while checked < 25:
        seed += 1
        schema = RandomSchemas(block * 10_000 + seed).document()
        try:
            grammar = compiled(JsonSchema(schema))
        except BadRequest as error:
            if "is valid against it" in error.message:
                validator = jsonschema.Draft202012Validator(schema)
                assert not any(map(validator.is_valid, INSTANCES)), schema
            continue
        checked += 1
        for sampling in range(3):
            output = sample(grammar, sampling, most=120)
            if output.finished:
                try:
                    check_valid(schema, output.text)
                except jsonschema.ValidationError as error:
                    pytest.fail(f"{json.dumps(schema)} admits {output.text}: {error.message}")
        validator = jsonschema.Draft202012Validator(schema)
        for instance in INSTANCES:
            if not validator.is_valid(instance):
                text = json.dumps(instance)
                assert not accepts(grammar, text), f"{json.dumps(schema)} admits {text}"
