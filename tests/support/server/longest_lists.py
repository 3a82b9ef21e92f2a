"""Bodies in which one list of the API is as long as it may be, made from ``/openapi.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from asyncllm.server.http.parse import MAX_PARTS

#: Bytes of a list; the largest body has 8 MiB.
MOST_BYTES = 7_500_000
#: Of lists of numbers without a bound.
MOST_NUMBERS = 1_000_000

_SIMPLE: dict[str, Any] = {"string": "w", "number": 1, "boolean": True, "null": None}


class Longest(NamedTuple):
    """A value in which one list is as long as it may be.

    Attributes:
        path: to the list.
        kind: how long it is, and what is in it.
    """

    path: str
    value: Any
    kind: tuple[int, str]

    def inside(self, step: str, value: Any) -> Longest:
        """The value that has this one in it."""
        return Longest(step + self.path, value, self.kind)


class LongestLists:
    """Walks through the schema of a body."""

    def __init__(self, document: dict[str, Any]):
        self._schemas = document["components"]["schemas"]

    def of(self, schema: dict[str, Any], within: tuple[str, ...] = ()) -> Iterator[Longest]:
        """For each list or free-form object in a value of this schema."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in within:
                yield from self.of(self._schemas[name], (*within, name))
            return
        for kind in ("anyOf", "oneOf", "allOf"):
            for option in schema.get(kind, ()):
                yield from self.of(option, within)
        if isinstance(items := schema.get("items"), dict):
            values = self._many(items, schema.get("maxItems"))
            yield Longest("[]", values, (len(values), str(values[:1])))
            yield from (inner.inside("[]", [inner.value]) for inner in self.of(items, within))
        if "properties" in schema:
            for name, inside in schema["properties"].items():
                for inner in self.of(inside, within):
                    whole = {**self.smallest(schema), name: inner.value}
                    yield inner.inside(f".{name}", whole)
        elif schema.get("type") == "object":
            inner_kind = schema.get("additionalProperties")
            values = self._many(
                inner_kind if isinstance(inner_kind, dict) else {}, schema.get("maxProperties")
            )
            numbered = {str(i): value for i, value in enumerate(values)}
            yield Longest("{}", numbered, (len(values), str(values[:1])))

    def smallest(self, schema: dict[str, Any], number: int = 5) -> Any:
        """A small value, by which values in a list differ if they are numbers."""
        if "$ref" in schema:
            return self.smallest(self._schemas[schema["$ref"].rpartition("/")[2]])
        for name in ("anyOf", "oneOf", "allOf"):
            for option in schema.get(name, ()):
                if option.get("type") != "null":
                    return self.smallest(option, number)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[-1])
        if "properties" in schema:
            named = schema["properties"]
            needed = {*schema.get("required", ()), *({"role", "content", "text"} & named.keys())}
            found = {name: self.smallest(named[name]) for name in needed}
            if "role" in found:
                found["role"] = "user"
            if "text" in found and "const" not in named.get("type", {}):
                found["type"] = "text"
            return found
        kind = schema.get("type", "string")
        if kind == "array":
            return [self.smallest(schema["items"])] if schema.get("minItems") else []
        if kind == "integer":
            return number % 200 + 5
        return _SIMPLE.get(kind, {})

    def _many(self, schema: dict[str, Any], most: int | None) -> list[Any]:
        one = json.dumps(self.smallest(schema))
        parts = one.count('"') // 2 + one.count("{") + one.count("[") + 1
        fitting = min(MOST_BYTES // (len(one) + 10), (MAX_PARTS - 100) // parts)
        if not isinstance(self.smallest(schema), (str, dict, list)):
            fitting = min(MOST_NUMBERS, MOST_BYTES // 5)
        return [self.smallest(schema, i) for i in range(min(fitting, most or fitting))]
