"""Which JSON types a schema gives a parameter, and a text as JSON of one of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 16  # of references and alternatives


def parameter_types(schema: Any, name: str) -> frozenset[str]:
    """The types that the property ``name`` of a tool's schema may have; none if nothing says so."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return frozenset()
    return _types(properties.get(name), schema, _MAX_DEPTH)


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth == 0:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return _TYPES & {declared}
    if isinstance(declared, list):
        return _TYPES & {kind for kind in declared if isinstance(kind, str)}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth - 1)
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_type_of, values))
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(keyword), list):
            return frozenset().union(*_each(parts, root, depth - 1))
    return frozenset()


def _each(parts: list[Any], root: Any, depth: int) -> Iterable[frozenset[str]]:
    return (_types(part, root, depth) for part in parts)


def _resolve(reference: str, root: Any) -> Any:
    """What a JSON pointer within the document, such as #/$defs/unit, points to."""
    target = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, dict) else None
    return target


def as_json(text: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON: the text itself where it is JSON of one of the types.

    True, False and None, as Python writes them, count as well. All else is a string.
    """
    plain = text.strip()
    for candidate in (plain, plain.lower(), "null" if plain == "None" else plain):
        try:
            value = json.loads(candidate, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        if _fits(value, types):
            return candidate
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    if kind == "string" or kind in types:  # a text with quotes around it, where strings may be
        return kind in types and kind != "string"
    if kind == "integer":
        return "number" in types
    return kind == "number" and "integer" in types and value.is_integer()


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case None:
            return "null"
        case dict():
            return "object"
    return "array"
