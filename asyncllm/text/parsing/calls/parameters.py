"""Reads arguments that are written one by one as text, and makes a JSON object of them."""

from __future__ import annotations

import re
from typing import Any

from asyncllm.text.parsing.calls.typed import TYPES, as_json, parameter_names, parameter_types
from asyncllm.text.parsing.formats import CallSyntax, ParameterStyle
from asyncllm.text.parsing.literal_atoms import QUOTES, escaped
from asyncllm.text.parsing.source import NO_MARKERS, Emit, Markers, Source, Steps, markers_of

_WORD = re.compile(r"\w+")
_IN_LINE = re.compile(r"[ \t]+")
_MAX_NAME = 256
#: What models write in a closing tag before its ``>``: a slash, a number, another tag's name.
_ODD = re.compile(r"[\w/]+")
_MAX_ODD = 16
#: A name in quotes, and further attributes.
_QUOTED = re.compile(r"""(["'])(.*?)\1(?:\s+\w+=[^\n]*)?""")


class ParameterReader:
    """Reads the parameters of one call, and emits the JSON object that they make.

    It is written like ``json.dumps``. A parameter that can only be a string is emitted as it comes,
    any other once it is whole. Markers that are missing are filled in, and the object is closed
    wherever the text ends.

    Args:
        call, style: how the call, and its parameters, are written.
        schema: the JSON schema of the parameters, which tells their types.
        following: markers that may follow the call.
    """

    def __init__(
        self,
        source: Source,
        emit: Emit,
        call: CallSyntax,
        style: ParameterStyle,
        schema: Any,
        following: Markers,
    ):
        self._source = source
        self._emit = emit
        self._style = style
        self._schema = schema
        self._call_end = markers_of(*call.closing)
        names = frozenset(parameter_names(schema))
        self._values = _ValueReader(source, call, style, following, names)
        self._whole = True
        self._on_lines = False  # the value begins on a line of its own

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
        self._on_lines = False
        line = "\n" if style.own_lines else ""  # ends a name that is not closed
        key_ends = markers_of(style.key_end, style.value_begin, line, *self._call_end.texts)
        self._whole = yield from source.until(key_ends, pieces.append)
        name = "".join(pieces).strip()
        if quoted := _QUOTED.fullmatch(name):
            name = quoted[2]
        yield from source.at(markers_of(style.key_end))
        kind = (yield from self._kind()) if style.kind_end else ""
        if not self._whole or (yield from self._breaks_off()):
            self._whole = False
            return before
        key = f'{before}"{escaped(name)}": '
        types = parameter_types(self._schema, name)
        if style.kind_end and kind != style.text_kind:
            types = types - {"string"} or TYPES
        elif style.kind_end:
            types = frozenset()
        if types <= {"string"}:
            self._emit(key + '"')
            self._whole = yield from self._values.read(
                name, lambda text: self._emit(escaped(text)), on_lines=self._on_lines
            )
            self._emit('"')
        else:
            pieces.clear()
            self._whole = yield from self._values.read(name, pieces.append, on_lines=self._on_lines)
            value = "".join(pieces)
            if not self._whole and not value.strip():
                return before
            self._emit(key + as_json(value, types, breaks_off=not self._whole))
        return ", "

    def _kind(self) -> Steps[str]:
        """Read the word for the kind of a value, and what is around it."""
        source = self._source
        yield from source.take(QUOTES)
        kind = yield from source.run(_WORD)
        yield from source.take(QUOTES)
        yield from source.at(markers_of(self._style.kind_end))
        return kind

    def _breaks_off(self) -> Steps[bool]:
        """Consume what begins a value; whether the text ends with it."""
        source, style = self._source, self._style
        if style.value_begin:
            begin = markers_of(style.value_begin)
            yield from source.skip_space()
            return not (yield from source.at(begin)) and (yield from source.breaks_off(begin))
        if style.own_lines:
            self._on_lines = bool((yield from source.take("\n")))
        return False


class _ValueReader:
    """Reads the value of a parameter up to what ends it: its own marker, or else that of the call.

    A value may contain these markers, and whole calls: models write about such texts. A marker ends
    the value if what belongs behind it follows and no call is open within the value. Any other
    marker ends the value only if no such marker is behind it.
    """

    def __init__(
        self,
        source: Source,
        call: CallSyntax,
        style: ParameterStyle,
        following: Markers,
        names: frozenset[str],
    ):
        self._source = source
        self._style = style
        self._names = names  # of the parameters that the schema has
        self._call_end = call.closing
        self._following = following
        self._behind = Markers((style.key_begin, *call.closing, *following.texts))
        sign = style.key_end[:1] if not style.key_end[:1].isalnum() else ""
        self._name = re.compile(rf"""[^<>/\n"'{re.escape(sign)}]+""")
        self._opens_call = markers_of((call.named.head if call.named else "") or call.begin)
        line = "\n" if style.own_lines else ""
        self._ends_call = markers_of(*call.closing[:1], *(line + end for end in call.closing[:1]))
        self._own = [style.value_end, line + style.value_end]
        is_tag = style.value_end.startswith("</") and style.value_end.endswith(">")
        self._unclosed = [end[:-1] for end in self._own] if is_tag else []
        # At the beginning of a line, where values have lines of their own, these are no text.
        self._sure = markers_of(*(line + end for end in (style.key_begin, *call.closing)))
        self._named_ends = "{}" in style.value_end
        self._own_end = self._odd_end = self._ends = NO_MARKERS  # of the value that is read
        self._others = (*self._sure.texts, *call.closing, *self._opens_call.texts)

    def read(self, name: str, emit: Emit, *, on_lines: bool) -> Steps[bool]:
        """Read the value of the parameter ``name`` with its end; False if it breaks off.

        Args:
            on_lines: the line break before its end is markup, as was the one at its beginning.
        """
        source = self._source
        self._own_end = markers_of(*self._own[: 1 + on_lines])
        self._odd_end = markers_of(*self._unclosed[: 1 + on_lines])
        self._ends = markers_of(*self._own_end.texts, *self._odd_end.texts, *self._others)
        if self._named_ends:
            named = [end.replace("{}", name) for end in self._own[: 1 + on_lines]]
            self._own_end, self._odd_end = Markers(named), NO_MARKERS
            self._ends = Markers((*named, *self._call_end, *self._opens_call.texts))
        depth = 0  # of calls within the value
        while (yield from source.until(self._ends, emit, breaks_off=True)):
            if opening := (yield from source.at(self._opens_call)):
                depth += 1
                emit(opening)
                continue
            source.mark()
            own = yield from source.at(self._own_end)
            odd = "" if own else (yield from self._odd())
            if not depth and (yield from self._follows(own)):
                source.rewind(len(own or odd))
                return True
            if odd:
                source.rewind()
                emit((yield from source.at(self._ends)))
                continue
            sure = bool(own) or (self._style.own_lines and (yield from source.sees(self._sure)))
            if (sure or depth) and source.may_look_on:
                held = [own]
                ends = yield from self._reads_on(held.append, depth)
                if ends is not None:
                    source.unmark()
                    emit("".join(held))
                    return ends
            source.rewind(len(own))
            if sure:
                return True
            emit((yield from source.at(self._ends)))
        return False

    def _odd(self) -> Steps[str]:
        """Consume the tag of the value that is written in an odd way: ``</parameter1>``."""
        source = self._source
        if not (begin := (yield from source.at(self._odd_end))):
            return ""
        rest = yield from source.run(_ODD, _MAX_ODD)
        return begin + rest + (yield from source.take(">"))

    def _reads_on(self, emit: Emit, depth: int) -> Steps[bool | None]:
        """Read on to the end of the value, if it is behind the markers that have been seen.

        Returns:
            None if it is not.
        """
        source = self._source
        while (yield from source.until(self._ends, emit, breaks_off=True)):
            if opening := (yield from source.at(self._opens_call)):
                depth += 1
                emit(opening)
            elif depth and (closing := (yield from source.at(self._ends_call))):
                depth -= 1
                emit(closing)
                yield from self._rest_of_end(emit)
            elif own := (yield from source.at(self._own_end)):
                if not depth and (yield from self._follows(own)):
                    return True
                emit(own)
            elif not depth and (yield from self._follows("")):
                return None
            else:
                emit((yield from source.at(self._ends)))
        return False if source.cut_off else None

    def _rest_of_end(self, emit: Emit) -> Steps[None]:
        """Read the markers behind the first one that ends a call within the value."""
        source = self._source
        for marker in self._call_end[1:]:
            source.mark()
            yield from source.skip_space()
            if (yield from source.at(markers_of(marker))):
                emit(source.unmark())
            else:
                source.rewind()

    def _follows(self, own: str) -> Steps[bool]:
        """Whether what belongs behind a value follows; ``own``: its marker, unless it has none.

        That is a name, or the end of the call before the next call, the end of the text or, if it
        is whole, the end of a line. A value without its marker does not end with that line, and
        only before the name of a parameter that the schema has, if it has any.
        """
        source, style = self._source, self._style
        source.mark()
        found = ""
        for marker in self._call_end:
            yield from source.skip_space()
            found = yield from source.at(markers_of(marker))
        yield from source.run(_IN_LINE)
        if not (found and own and (yield from source.peek()) == "\n"):
            yield from source.skip_space()
            found = yield from source.at(self._following)
        if not found and (yield from source.at(markers_of(style.key_begin))):
            yield from source.take(QUOTES)
            name = yield from source.run(self._name, _MAX_NAME)
            yield from source.take(QUOTES)
            is_line = style.own_lines and name in self._names
            line_end = (yield from source.take("\n")) if is_line else ""
            yield from source.skip_space()
            found = (yield from source.at(markers_of(style.key_end))) or line_end
            if not own and self._names and name.strip() not in self._names:
                found = ""
        follows = bool(found) or (yield from source.breaks_off(self._behind))
        source.rewind()
        return follows
