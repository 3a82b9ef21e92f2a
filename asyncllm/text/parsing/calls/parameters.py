"""Reads arguments that are written one by one as text, and makes a JSON object of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from asyncllm.text.parsing.source import markers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.text.parsing.formats import ParameterStyle
    from asyncllm.text.parsing.source import Emit, Markers, Source, Steps

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 16  # of references and alternatives


def read_parameters(
    source: Source, emit: Emit, style: ParameterStyle, schema: Any, call_end: tuple[str, ...]
) -> Steps[bool]:
    """Read parameters, from behind the first ``key_begin``, and emit the JSON object they make.

    It is written like ``json.dumps``. A parameter that can only be a string is emitted as it comes,
    any other once it is whole. If the text breaks off, the object stays open.

    Args:
        schema: the JSON schema of the parameters, which tells their types.
        call_end: markers that may follow the last parameter.

    Returns:
        Whether the object was closed.
    """
    key_begin = markers_of(style.key_begin)
    value_ends = _value_ends(style, call_end)
    before = "{"
    while True:
        emit(before)
        if not (yield from _read_parameter(source, emit, style, schema, value_ends)):
            return False
        yield from source.skip_space()
        if not (yield from source.at(key_begin)):
            break
        before = ", "
    if (yield from source.breaks_off(key_begin)):
        return False
    emit("}")
    return True


def _value_ends(style: ParameterStyle, call_end: tuple[str, ...]) -> Markers:
    """The markers that end a value. Where values have lines of their own, any markup does."""
    if not style.own_lines:
        return markers_of(style.value_end)
    following = (style.value_end, style.key_begin, *call_end[:1])
    return markers_of(style.value_end, *("\n" + marker for marker in following))


def _read_parameter(
    source: Source, emit: Emit, style: ParameterStyle, schema: Any, value_ends: Markers
) -> Steps[bool]:
    """Read one, from behind ``key_begin``; False if it breaks off."""
    pieces: list[str] = []

    def emit_key(text: str) -> None:
        pieces.append(text)
        emit(_escaped(text))

    emit('"')
    if not (yield from source.until(markers_of(style.key_end), emit_key)):
        return False
    yield from source.at(markers_of(style.key_end))
    emit('": ')
    if style.value_begin:
        value_begin = markers_of(style.value_begin)
        yield from source.skip_space()
        if not (yield from source.at(value_begin)) and (yield from source.breaks_off(value_begin)):
            return False
    if style.own_lines:
        yield from source.take("\n")
    types = parameter_types(schema, "".join(pieces))
    if types <= {"string"}:
        emit('"')
        whole = yield from source.until(value_ends, lambda text: emit(_escaped(text)))
        if whole:
            emit('"')
    else:
        pieces.clear()
        whole = yield from source.until(value_ends, pieces.append)
        value = "".join(pieces)
        emit(as_json(value, types) if whole else value.strip())
    yield from source.at(markers_of(style.value_end, "\n" + style.value_end))
    return whole


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


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
    """The target of a JSON pointer within the document, such as #/$defs/unit; None without one."""
    target = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, dict) else None
    return target


def as_json(text: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON: the text itself if it is JSON of one of the types, else a string.

    Python's True, False and None count as JSON.
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
