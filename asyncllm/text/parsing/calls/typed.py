"""The values of parameters that are written as text, in the types that a tool's schema has."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from asyncllm.text.parsing.literal import Literal
from asyncllm.text.parsing.source import Source

#: The types of JSON.
TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 16  # of references and alternatives
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_NONE = {"None": "null"}
#: Types of Python and of JSON.
_TYPE_OF: Final[dict[type, str]] = {
    **{bool: "boolean", str: "string", int: "integer", float: "number"},
    **{type(None): "null", dict: "object"},
}


def parameter_names(schema: Any) -> list[str]:
    """The names of the properties of a tool's schema, in order."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return [*properties] if isinstance(properties, dict) else []


def parameter_types(schema: Any, name: str) -> frozenset[str]:
    """The types that the property ``name`` of a tool's schema may have; none if it is unknown."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return frozenset()
    return _types(properties.get(name), schema, _MAX_DEPTH)


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth == 0:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return TYPES & {declared}
    if isinstance(declared, list):
        return TYPES & {kind for kind in declared if isinstance(kind, str)}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth - 1)
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_type_of, values))
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(keyword), list):
            return frozenset().union(*(_types(part, root, depth - 1) for part in parts))
    return frozenset()


def _resolve(reference: str, root: Any) -> Any:
    """The target of a JSON pointer within the document, such as #/$defs/unit; None without one."""
    target = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, dict) else None
    return target


def as_json(text: str, types: frozenset[str], *, breaks_off: bool = False) -> str:
    """A parameter's text as JSON: a value of one of the types if it is one, else a string.

    The value may be written in JSON or in Python.

    Args:
        breaks_off: the text may lack its end.
    """
    plain = text.strip()
    found = literal_of(plain)
    if "string" in types:
        # As Python or JSON has it, or else it is the string that it may be.
        as_written = found.json[:1] in ("{", "[") or found.json in (plain.lower(), _NONE.get(plain))
        breaks_off, fits = False, found.exact and as_written
    else:
        if found.json.startswith('"'):  # with quotes around it, or a word
            plain = json.loads(found.json).strip()
            found = literal_of(plain)
        fits = breaks_off or found.whole
    if fits and found.length == len(plain) and _fits(found.json, types):
        return found.json
    return json.dumps(text, ensure_ascii=False)


def _fits(value: str, types: frozenset[str]) -> bool:
    """Whether a JSON text that is no string has one of the types."""
    kind = _KINDS.get(value[:1], "number")
    if kind != "number" or not value:
        return kind in types and kind != "string"
    if value.lstrip("-").isdecimal():
        return "integer" in types or "number" in types
    return "number" in types or ("integer" in types and float(value).is_integer())


def _type_of(value: Any) -> str:
    return _TYPE_OF.get(type(value), "array")


class WrittenLiteral(NamedTuple):
    """A value at the beginning of a text.

    Attributes:
        json: as JSON.
        length: of its text.
        whole: the text did not break off.
        exact: there was nothing but constants, strings and brackets.
    """

    json: str
    length: int
    whole: bool
    exact: bool


def literal_of(text: str, quote: str = "", *, of_call: bool = False) -> WrittenLiteral:
    """Read the value with which a text begins; arguments as ``Literal`` has them."""
    source = Source()
    source.feed(text)
    source.end()
    pieces: list[str] = []
    literal = Literal(source, pieces.append, quote=quote, of_call=of_call)
    try:
        next(literal.read())
    except StopIteration as end:
        return WrittenLiteral("".join(pieces), source.consumed, end.value, literal.exact)
    raise AssertionError("nothing waits for a text that has ended")
