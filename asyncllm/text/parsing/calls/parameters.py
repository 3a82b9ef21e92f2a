"""Reads arguments that are written one by one as text, and makes a JSON object of them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from asyncllm.text.parsing.literal import literal_of
from asyncllm.text.parsing.literal_atoms import escaped
from asyncllm.text.parsing.source import NO_MARKERS, Markers, markers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.text.parsing.formats import ParameterStyle
    from asyncllm.text.parsing.source import Emit, Source, Steps

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 16  # of references and alternatives
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_NAME = re.compile(r"[^<>\n]+")
_WORD = re.compile(r"\w+")
_MAX_NAME = 256
_NONE = {"None": "null"}


class ParameterReader:
    """Reads the parameters of one call, and emits the JSON object that they make.

    It is written like ``json.dumps``. A parameter that can only be a string is emitted as it comes,
    any other once it is whole. Markers that are missing are filled in, and the object is closed
    wherever the text ends.

    Args:
        schema: the JSON schema of the parameters, which tells their types.
        call_end: markers that may follow the last parameter.
        following: markers that may follow the first of these: the others, and the next call's.
    """

    def __init__(
        self,
        source: Source,
        emit: Emit,
        style: ParameterStyle,
        schema: Any,
        call_end: tuple[str, ...],
        following: Markers,
    ):
        self._source = source
        self._emit = emit
        self._style = style
        self._schema = schema
        self._call_end = markers_of(*call_end)
        self._following = following
        line = "\n" if style.own_lines else ""
        self._others = [line + end for end in (style.key_begin, *call_end)]
        self._sure_ends = markers_of(*self._others[:2]) if line else NO_MARKERS
        self._named_ends = "{}" in style.value_end
        self._whole = True

    def read(self) -> Steps[bool]:
        """Read from behind the first ``key_begin``; False if the text breaks off."""
        source = self._source
        key_begin = markers_of(self._style.key_begin)
        before = "{"
        while True:
            before = yield from self._parameter(before)
            yield from source.skip_space()
            if not self._whole or (yield from source.sees(self._call_end)):
                break
            if not (yield from source.at(key_begin)):
                break
        self._emit("}" if before != "{" else "{}")
        return self._whole and not (yield from source.breaks_off(key_begin))

    def _parameter(self, before: str) -> Steps[str]:
        """Read one; return what comes before the next."""
        source, style = self._source, self._style
        pieces: list[str] = []
        key_ends = markers_of(style.key_end, style.value_begin, *self._call_end.texts)
        self._whole = yield from source.until(key_ends, pieces.append)
        name = "".join(pieces).strip()
        yield from source.at(markers_of(style.key_end))
        kind = (yield from source.run(_WORD)) if style.kind_end else ""
        yield from source.at(markers_of(style.kind_end))
        if not self._whole or (yield from self._breaks_off()):
            self._whole = False
            return before
        key = f'{before}"{escaped(name)}": '
        types = parameter_types(self._schema, name)
        if style.kind_end and kind != style.text_kind:
            types = types - {"string"} or _TYPES
        elif style.kind_end:
            types = frozenset()
        if types <= {"string"}:
            self._emit(key + '"')
            self._whole = yield from self._value(name, lambda text: self._emit(escaped(text)))
            self._emit('"')
        else:
            pieces.clear()
            self._whole = yield from self._value(name, pieces.append)
            value = "".join(pieces)
            if not self._whole and not value.strip():
                return before
            self._emit(key + as_json(value, types, breaks_off=not self._whole))
        return ", "

    def _breaks_off(self) -> Steps[bool]:
        """Consume what begins a value; whether the text ends with it."""
        source, style = self._source, self._style
        if style.value_begin:
            begin = markers_of(style.value_begin)
            yield from source.skip_space()
            return not (yield from source.at(begin)) and (yield from source.breaks_off(begin))
        if style.own_lines:
            yield from source.take("\n")
        return False

    def _value(self, name: str, emit: Emit) -> Steps[bool]:
        """Read the value of a parameter and the marker that ends it; False if it breaks off."""
        source, end = self._source, self._style.value_end
        if self._named_ends:
            own_end = Markers((end.replace("{}", name),))
            ends = Markers((*own_end.texts, *self._call_end.texts))
        else:
            own_end = markers_of(end, "\n" + end if self._style.own_lines else "")
            ends = markers_of(*own_end.texts, *self._others)
        while (yield from source.until(ends, emit, breaks_off=True)):
            if (yield from source.at(own_end)) or (yield from self._ends_here()):
                return True
            emit((yield from source.at(ends)))
        return False

    def _ends_here(self) -> Steps[bool]:
        """Whether the marker that comes next ends a value that lacks its own end.

        It does at the beginning of a line, where values have lines of their own. Otherwise it does
        if what belongs behind it follows: a name, another end of the call, the next call, or the
        end of the text.
        """
        source, style = self._source, self._style
        if (yield from source.sees(self._sure_ends)):
            return True
        source.mark()
        yield from source.skip_space()
        if not self._named_ends and (yield from source.at(markers_of(style.key_begin))):
            yield from source.run(_NAME, _MAX_NAME)
            follows = bool((yield from source.at(markers_of(style.key_end))))
        else:
            yield from source.at(self._call_end)
            yield from source.skip_space()
            follows = not (yield from source.peek()) or (yield from source.sees(self._following))
        source.rewind()
        return follows


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
