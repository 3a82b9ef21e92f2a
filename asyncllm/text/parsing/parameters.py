"""Reads arguments that are written one by one as text, and makes a JSON object of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from asyncllm.text.parsing.parameter_types import as_json, parameter_types
from asyncllm.text.parsing.source import markers_of

if TYPE_CHECKING:
    from asyncllm.text.parsing.formats import ParameterStyle
    from asyncllm.text.parsing.source import Emit, Markers, Source, Steps


def read_parameters(
    source: Source, emit: Emit, style: ParameterStyle, schema: Any, call_end: tuple[str, ...]
) -> Steps[bool]:
    """Read parameters, from behind the first ``key_begin``, and emit the JSON object they make.

    It is written as ``json.dumps`` would. The text of a parameter that can only be a string goes on
    as it comes; any other has to be whole. What breaks off leaves the object open.

    Args:
        schema: the JSON schema of all the parameters; it tells the type of each.
        call_end: what may come after the last one.

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
    """What ends a value. Where values have lines of their own, the next markup does so too."""
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
