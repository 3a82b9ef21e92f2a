"""Reads arguments that are written in Python, ``key=value, ...)``, and makes JSON of them."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Final

from asyncllm.text.parsing.source import markers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.text.parsing.source import Emit, Source, Steps

_STARS = re.compile(r"\*+")
_WORD = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
#: Python's and JSON's, as models mix them up.
_CONSTANTS: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    **{name: name for name in ("true", "false", "null")},
}
_CLOSERS: Final = {"[": "]", "(": ")", "{": "}"}
_ESCAPES: Final = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"},
    "\n": "",
}
_OCTAL = re.compile(r"[0-7]+")
#: Escapes by a code, with the number of its hexadecimal digits.
_CODES: Final = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_MAX_DEPTH = 64  # of lists and dictionaries


class NotPython(Exception):
    """The text is not Python, or not only constants, lists and dictionaries.

    ``text``: what has been consumed and not emitted.
    """

    def __init__(self, text: str = ""):
        super().__init__(text)
        self.text = text


class BreaksOff(Exception):
    """The text has ended before the last bracket."""


class PythonArguments:
    """The arguments of one call. Strings are emitted as they come.

    Args:
        names: of the tool's parameters, for arguments without a name.
    """

    def __init__(self, source: Source, emit: Emit, names: Sequence[str]):
        self._source = source
        self._emit = emit
        self._names = names

    def read(self) -> Steps[None]:
        """Read from behind the opening bracket of the call to behind the closing one.

        Raises:
            NotPython, BreaksOff: with what came before emitted.
        """
        if (yield from self._next()) == "*":  # **{...}, where names are none of Python's
            stars = yield from self._source.run(_STARS)
            if stars != "**" or (yield from self._next()) != "{":
                raise NotPython(stars)
            yield from self._value(0)
            yield from self._source.skip_space()
            comma = yield from self._source.take(",")
            if (yield from self._next()) != ")":
                raise NotPython(comma)
            yield from self._source.take(")")
            return
        self._emit("{")
        count = 0
        while (yield from self._has_another(")", count)):
            yield from self._argument(count)
            count += 1
        self._emit("}")

    def _has_another(self, closer: str, count: int) -> Steps[bool]:
        """Consume the comma after ``count`` items, or the closing bracket."""
        if (yield from self._next()) != closer and count:
            yield from self._punctuation(",")
        if (yield from self._next()) == closer:
            yield from self._source.take(closer)
            return False
        if count:
            self._emit(", ")
        return True

    def _argument(self, index: int) -> Steps[None]:
        word = ""
        if (yield from self._next()) not in "'\"[({":
            word = yield from self._word()
            if (yield from self._next()) == "=":
                yield from self._source.take("=")
                self._emit(f'"{_escaped(word)}": ')
                yield from self._value(0)
                return
        if index >= len(self._names):
            raise NotPython(word)
        self._emit(f'"{_escaped(self._names[index])}": ')
        if word:
            self._emit(_constant(word))
        else:
            yield from self._value(0)

    def _value(self, depth: int) -> Steps[None]:
        char = yield from self._next()
        if char in "'\"":
            yield from self._string()
        elif char not in _CLOSERS:
            self._emit(_constant((yield from self._word())))
        elif depth == _MAX_DEPTH:
            raise NotPython
        elif char == "{":
            yield from self._dictionary(depth)
        elif char == "[":
            yield from self._list(depth)
        else:
            yield from self._parentheses(depth)

    def _list(self, depth: int) -> Steps[None]:
        yield from self._source.take("[")
        self._emit("[")
        count = 0
        while (yield from self._has_another("]", count)):
            yield from self._value(depth + 1)
            count += 1
        self._emit("]")

    def _parentheses(self, depth: int) -> Steps[None]:
        """Read a value in parentheses or, which a comma shows, a tuple; emit it at its end."""
        yield from self._source.take("(")
        emit, items, item = self._emit, list[str](), list[str]()
        self._emit = item.append
        is_tuple = False
        try:
            while (yield from self._next()) != ")":
                yield from self._value(depth + 1)
                items.append("".join(item))
                item.clear()
                if (yield from self._next()) == ",":
                    is_tuple = True
                    yield from self._source.take(",")
                elif (yield from self._next()) != ")":
                    raise NotPython
            yield from self._source.take(")")
        except (NotPython, BreaksOff):
            emit("[" + ", ".join([*items, "".join(item)] if item else items))
            raise
        finally:
            self._emit = emit
        emit(items[0] if len(items) == 1 and not is_tuple else f"[{', '.join(items)}]")

    def _dictionary(self, depth: int) -> Steps[None]:
        yield from self._source.take("{")
        self._emit("{")
        count = 0
        while (yield from self._has_another("}", count)):
            if (yield from self._next()) in "'\"":
                yield from self._string()
            else:
                self._emit(f'"{_constant((yield from self._word()))}"')
            yield from self._punctuation(":")
            self._emit(": ")
            yield from self._value(depth + 1)
            count += 1
        self._emit("}")

    def _string(self) -> Steps[None]:
        """Read a string, or several one after the other, which are one."""
        self._emit('"')
        char = "'"
        while char and char in "'\"":
            yield from self._part_of_string()
            yield from self._source.skip_space()
            char = yield from self._source.peek()
        self._emit('"')

    def _part_of_string(self) -> Steps[None]:
        """Read what is between quotes, one or three; line breaks may be in either."""
        source, emit = self._source, self._emit
        quote = yield from source.at(markers_of("'''", '"""'))
        quote = quote or (yield from source.take("'\""))
        parts = markers_of(quote, "\\")
        while (yield from source.until(parts, lambda text: emit(_escaped(text)))):
            if (yield from source.at(parts)) == quote:
                return
            emit((yield from self._escape()))
        raise BreaksOff

    def _escape(self) -> Steps[str]:
        """What an escape stands for, from behind its backslash, as JSON."""
        char = yield from self._source.peek()
        if not char:
            raise BreaksOff
        if octal := (yield from self._source.run(_OCTAL, 3)):
            return _character(int(octal, 8))
        yield from self._source.take(char)
        if digits := _CODES.get(char):
            code = yield from self._source.run(_HEX, digits)
            if len(code) == digits:
                return _character(int(code, 16))
            return _escaped("\\" + char + code)
        if char in _ESCAPES or char in "'\"\\":
            return _escaped(_ESCAPES.get(char, char))
        return _escaped("\\" + char)  # as Python has it; \\N, a character by name, is not known

    def _word(self) -> Steps[str]:
        yield from self._source.skip_space()
        word = yield from self._source.run(_WORD)
        if not word:
            raise NotPython
        return word

    def _next(self) -> Steps[str]:
        """The next character that is not space, which is not consumed."""
        yield from self._source.skip_space()
        char = yield from self._source.peek()
        if not char:
            raise BreaksOff
        return char

    def _punctuation(self, char: str) -> Steps[None]:
        if (yield from self._next()) != char:
            raise NotPython
        yield from self._source.take(char)


def _constant(word: str) -> str:
    """A constant or a number as JSON.

    Raises:
        NotPython: it is neither.
    """
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        raise NotPython(word) from None
    if not math.isfinite(number):
        raise NotPython(word)
    return repr(number)


def _character(code: int) -> str:
    if 0xD800 <= code < 0xE000:
        return f"\\u{code:04x}"  # half of a pair, which only JSON can say
    return _escaped(chr(code)) if code <= 0x10FFFF else "\N{REPLACEMENT CHARACTER}"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
