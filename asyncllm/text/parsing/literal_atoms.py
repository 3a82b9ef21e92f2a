"""Reads the strings, numbers and constants of a literal, and writes them as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Final

from asyncllm.text.parsing.source import NO_MARKERS, Emit, Markers, Source, Steps, markers_of

QUOTES: Final = "'\""
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_ZERO_FIRST = re.compile(r"[+-]?0\d")
#: JSON's, Python's and what models make of them, in lower case.
_CONSTANTS: Final = {
    **{name: name for name in ("true", "false", "null")},
    **dict.fromkeys(("none", "undefined", "nan"), "null"),
    **dict.fromkeys(("inf", "+inf", "-inf", "infinity", "-infinity"), "null"),
}
_TRIPLE = markers_of("'''", '"""')
_BACKSLASH = markers_of("\\")
#: What Python's escapes stand for; a backslash at the end of the text for nothing.
_ESCAPES: Final = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"},
    **{"\n": "", "'": "'", '"': '"', "\\": "\\", "/": "/", "": ""},
}
_OCTAL = re.compile(r"[0-7]+")
#: Python's escapes by a code, with the number of its hexadecimal digits.
_CODES: Final = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_CODE = markers_of("\\u")
_FIRST_HALF = re.compile("[dD][89abAB]..")
_SECOND_HALF = re.compile("[dD][c-fC-F]..")
_NO_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"


class LiteralString:
    """Reads the strings of one value.

    Args:
        stops: markers that end the value, unless they are within a string.
        mark: another mark around strings, which know no escapes then.
        calls: how calls begin that end the value at the beginning of a line.
    """

    def __init__(self, source: Source, stops: Markers, mark: Markers, calls: Markers = NO_MARKERS):
        self._source = source
        self._stops = stops
        self._calls = calls
        self._mark = mark

    def opens(self, char: str) -> Steps[bool]:
        """Whether a string comes next; ``char`` comes next."""
        if char in QUOTES:
            return True
        return char in self._mark.first_chars and (yield from self._source.sees(self._mark))

    def breaks_off(self, char: str) -> Steps[bool]:
        """Discard the beginning of a mark with which the text ends; ``char`` comes next."""
        return char in self._mark.first_chars and (yield from self._source.breaks_off(self._mark))

    def read(self, write: Emit, *, in_python: bool, followed_by: str) -> Steps[bool]:
        """Read a string, or in Python several, which are one; False if it breaks off.

        Args:
            in_python: strings in double quotes have Python's escapes, too.
            followed_by: characters of which one follows a quote that closes the string; any other
                shows a quote that lacks a backslash. "" if the first quote closes the string.
        """
        source = self._source
        write('"')
        whole = True
        if (yield from source.at(self._mark)):
            whole = yield from source.until(
                self._mark, lambda text: write(escaped(text)), breaks_off=True
            )
            yield from source.at(self._mark)
        else:
            char = yield from source.peek()
            while whole and char and char in QUOTES:
                whole = yield from self._part(write, in_python, followed_by)
                if not in_python:
                    break
                yield from source.skip_space()
                char = yield from source.peek()
        write('"')
        return whole

    def _part(self, write: Emit, in_python: bool, followed_by: str) -> Steps[bool]:
        """Read what is between quotes, one or three; False if it breaks off."""
        source = self._source
        triple = yield from source.at(_TRIPLE)
        quote = triple or (yield from source.take(QUOTES))
        in_json = quote == '"' and not in_python
        escape = self._in_json if in_json else self._in_python
        line = "\n" if self._calls.texts else ""  # behind which a call may begin
        parts = markers_of(quote, "\\", line, *self._stops.texts)
        plain = _plain_json(self._stops.first_chars)
        while (not in_json or (yield from source.stream(plain, write))) and (
            yield from source.until(parts, lambda text: write(escaped(text)))
        ):
            if (yield from source.at(_BACKSLASH)):
                write((yield from escape()))
            elif (
                line
                and (yield from source.peek()) == line
                and not (yield from source.sees(self._calls, 1))
            ):
                write(escaped((yield from source.take(line))))
            elif not (yield from source.at(markers_of(quote))):
                return (yield from self._holds_stop(write, quote, escape, followed_by))
            elif triple or not followed_by:
                return True
            else:
                char = yield from source.glance()
                if not char or char in followed_by + QUOTES or char in self._stops.first_chars:
                    return True
                write(escaped(quote))
        return False

    def _holds_stop(
        self, write: Emit, quote: str, escape: Callable[[], Steps[str]], followed_by: str
    ) -> Steps[bool]:
        """Read on from a marker that would end the value; False if it does.

        If the next quote closes the string properly, the marker is text. If not, the string was
        never closed, and ends before the marker.
        """
        source = self._source
        source.mark()
        held: list[str] = []
        parts = markers_of(quote, "\\")
        closed = False
        while (yield from source.until(parts, lambda text: held.append(escaped(text)))):
            if (yield from source.at(_BACKSLASH)):
                held.append((yield from escape()))
                continue
            yield from source.at(parts)
            char = yield from source.glance()
            closed = not char or char in (followed_by or ":=,}")
            break
        if closed or source.cut_off:
            source.unmark()
            write("".join(held))
        else:
            source.rewind()
        return closed

    def _in_json(self) -> Steps[str]:
        """What follows a backslash in JSON, as JSON; "" if it breaks off."""
        char = yield from self._source.peek()
        yield from self._source.take(char)
        if digits := _CODES.get(char):
            return (yield from self._code(char, digits, in_json=True))
        if char and char in '"\\/bfnrt':
            return "\\" + char
        return char if char in "'" else escaped("\\" + char)

    def _in_python(self) -> Steps[str]:
        """What follows a backslash in Python, as JSON; "" if it breaks off."""
        source = self._source
        if octal := (yield from source.run(_OCTAL, 3)):
            return escaped(chr(int(octal, 8)))
        char = yield from source.peek()
        yield from source.take(char)
        if digits := _CODES.get(char):
            return (yield from self._code(char, digits, in_json=False))
        return escaped(_ESCAPES.get(char, "\\" + char))  # \\N, a character by name, is not known

    def _code(self, char: str, digits: int, *, in_json: bool) -> Steps[str]:
        """The character of a code, and the other half of a pair; what is JSON stays as it is."""
        source = self._source
        code = yield from source.run(_HEX, digits)
        if len(code) < digits:
            return escaped("\\" + char + code) if (yield from source.peek()) else ""
        value = int(code, 16)
        if value >> 11 == 0xD800 >> 11:
            return (yield from self._pair(code))
        if in_json and char == "u":
            return f"\\u{code}"
        return escaped(chr(value)) if value <= 0x10FFFF else _NO_CHARACTER

    def _pair(self, first: str) -> Steps[str]:
        """The first half of a pair, and the second, if that follows."""
        source = self._source
        source.mark()
        if _FIRST_HALF.fullmatch(first) and (yield from source.at(_CODE)):
            second = yield from source.run(_HEX, 4)
            if _SECOND_HALF.fullmatch(second):
                source.unmark()
                return f"\\u{first}\\u{second}"
        source.rewind()
        return _NO_CHARACTER


@cache
def _plain_json(first_chars: frozenset[str]) -> re.Pattern[str]:
    """What stands in JSON as it is, up to what may be a marker."""
    others = re.escape("".join(sorted(first_chars)))
    return re.compile(rf'(?:[^"\\\x00-\x1f{others}]++|\\["\\/bfnrt])+')


def escaped(text: str) -> str:
    """A text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def constant_of(word: str, *, breaks_off: bool) -> str:
    """A constant or a number as JSON; "" if it is neither. One that ``breaks_off`` may be short."""
    lower = word.lower()
    if lower in _CONSTANTS:
        return _CONSTANTS[lower]
    if _NUMBER.fullmatch(word):
        return word
    if _ZERO_FIRST.match(word):
        return ""  # a code, in which zeros count
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        short = (value for name, value in _CONSTANTS.items() if name.startswith(lower))
        return next(short, "") if breaks_off and word else ""
    return repr(number) if math.isfinite(number) else "null"
