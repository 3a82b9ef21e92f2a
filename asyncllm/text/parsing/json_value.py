"""JSON in pieces: where a value ends, and what a string in it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeAlias

#: Characters that a JSON value can begin with.
VALUE_FIRST = '{["-0123456789tfn'

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_RUN = re.compile(r'[^"\\]*')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSER = {"{": "}", "[": "]"}

# RFC 8259's number as a table: state -> class of character -> state. A number may end where the
# state is one of _NUMBER_ENDS.
_NUMBER = {
    "sign": {"0": "zero", "1": "int"},
    "zero": {".": "point", "e": "e"},
    "int": {"0": "int", "1": "int", ".": "point", "e": "e"},
    "point": {"0": "frac", "1": "frac"},
    "frac": {"0": "frac", "1": "frac", "e": "e"},
    "e": {"+": "e_sign", "0": "exp", "1": "exp"},
    "e_sign": {"0": "exp", "1": "exp"},
    "exp": {"0": "exp", "1": "exp"},
}
_NUMBER_ENDS = frozenset({"zero", "int", "frac", "exp"})
_NUMBER_CLASS = {
    "0": "0",
    **dict.fromkeys("123456789", "1"),
    ".": ".",
    **dict.fromkeys("eE", "e"),
    **dict.fromkeys("+-", "+"),
}


class JsonValue:
    """One JSON value, followed through text that comes in pieces.

    RFC 8259, but for control characters within strings: models write line breaks there, and where
    the string ends is as clear. Nesting may be of any depth.

    Attributes:
        done: the value has ended. A number, which has no end of its own, is done when something
            else follows.
        failed: the next character cannot be there.
    """

    __slots__ = ("_closers", "_count", "_is_key", "_literal", "_number", "_state", "done", "failed")

    def __init__(self) -> None:
        self._state: _State = _value
        self._closers: list[str] = []  # what closes the open arrays and objects, innermost last
        self._is_key = False  # the string being read is one
        self._literal = ""  # what is still to come of it
        self._number = ""  # state in _NUMBER
        self._count = 0  # hexadecimal digits of an escape still to come
        self.done = False
        self.failed = False

    def scan(self, text: str, pos: int) -> int:
        """Read on from ``pos``.

        Returns the end of the text, or that of the value when ``done``, or the position of the
        wrong character when ``failed``.
        """
        while pos < len(text) and not self.done and not self.failed:
            pos = self._state(self, text, pos)
        return pos

    def end_value(self) -> None:
        if self._closers:
            self._state = _after_value
        else:
            self.done = True

    def fail(self, pos: int) -> int:
        self.failed = True
        return pos

    def go(self, state: _State, pos: int) -> int:
        """Change the state, having read up to ``pos``."""
        self._state = state
        return pos


# A state reads from a position that is not the text's end, and returns the next one.
_State: TypeAlias = Callable[[JsonValue, str, int], int]


def _value(v: JsonValue, text: str, pos: int) -> int:
    pos = _skip_space(text, pos)
    if pos == len(text):
        return pos
    char = text[pos]
    if char == '"':
        return v.go(_string, pos + 1)
    if closer := _CLOSER.get(char):
        v._closers.append(closer)
        return v.go(_first_key if char == "{" else _first_item, pos + 1)
    if literal := _LITERALS.get(char):
        v._literal = literal[1:]
        return v.go(_in_literal, pos + 1)
    if char == "-" or char in "0123456789":
        v._number = "sign" if char == "-" else "zero" if char == "0" else "int"
        return v.go(_in_number, pos + 1)
    return v.fail(pos)


def _first_item(v: JsonValue, text: str, pos: int) -> int:
    pos = _skip_space(text, pos)
    if pos < len(text) and text[pos] == "]":
        return _close(v, pos)
    return v.go(_value, pos) if pos < len(text) else pos


def _first_key(v: JsonValue, text: str, pos: int) -> int:
    pos = _skip_space(text, pos)
    if pos < len(text) and text[pos] == "}":
        return _close(v, pos)
    return v.go(_key, pos) if pos < len(text) else pos


def _key(v: JsonValue, text: str, pos: int) -> int:
    pos = _skip_space(text, pos)
    if pos == len(text):
        return pos
    if text[pos] != '"':
        return v.fail(pos)
    v._is_key = True
    return v.go(_string, pos + 1)


def _colon(v: JsonValue, text: str, pos: int) -> int:
    pos = _skip_space(text, pos)
    if pos == len(text):
        return pos
    if text[pos] != ":":
        return v.fail(pos)
    return v.go(_value, pos + 1)


def _after_value(v: JsonValue, text: str, pos: int) -> int:
    pos = _skip_space(text, pos)
    if pos == len(text):
        return pos
    if text[pos] == ",":
        return v.go(_key if v._closers[-1] == "}" else _value, pos + 1)
    return _close(v, pos) if text[pos] == v._closers[-1] else v.fail(pos)


def _close(v: JsonValue, pos: int) -> int:
    v._closers.pop()
    v.end_value()
    return pos + 1


def _string(v: JsonValue, text: str, pos: int) -> int:
    pos = _STRING_RUN.match(text, pos).end()  # type: ignore[union-attr]  # matches anywhere
    if pos == len(text):
        return pos
    if text[pos] == "\\":
        return v.go(_escape, pos + 1)
    if v._is_key:
        v._is_key = False
        return v.go(_colon, pos + 1)
    v.end_value()
    return pos + 1


def _escape(v: JsonValue, text: str, pos: int) -> int:
    if text[pos] == "u":
        v._count = 4
        return v.go(_hex_digits, pos + 1)
    return v.go(_string, pos + 1) if text[pos] in '"\\/bfnrt' else v.fail(pos)


def _hex_digits(v: JsonValue, text: str, pos: int) -> int:
    if text[pos] not in "0123456789abcdefABCDEF":
        return v.fail(pos)
    v._count -= 1
    return v.go(_hex_digits if v._count else _string, pos + 1)


def _in_literal(v: JsonValue, text: str, pos: int) -> int:
    if text[pos] != v._literal[0]:
        return v.fail(pos)
    v._literal = v._literal[1:]
    if not v._literal:
        v.end_value()
    return pos + 1


def _in_number(v: JsonValue, text: str, pos: int) -> int:
    while pos < len(text):
        following = _NUMBER[v._number].get(_NUMBER_CLASS.get(text[pos], ""))
        if following is None:
            if v._number not in _NUMBER_ENDS:
                return v.fail(pos)
            v.end_value()
            return pos
        v._number = following
        pos += 1
    return pos


def _skip_space(text: str, pos: int) -> int:
    return _SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches anywhere


class StringDecoder:
    """What a JSON string stands for, as its text comes in. The text is known to be well-formed.

    Escapes are decoded when they are complete, two that make up one character together; half of
    such a pair alone becomes U+FFFD.
    """

    # Up to the closing quote or an escape that is not complete. The first half of a pair counts as
    # complete when it is clear whether the second follows.
    _COMPLETE = re.compile(
        r"""(?x: [^"\\]++
            | \\ [^u]
            | \\u (?! [dD][89abAB]) [0-9a-fA-F]{4}
            | \\u [dD][89abAB] [0-9a-fA-F]{2} \\u [dD][c-fC-F] [0-9a-fA-F]{2}
            | \\u [dD][89abAB] [0-9a-fA-F]{2}
                (?= [^\\] | \\ [^u] | \\u (?! [dD][c-fC-F]) [0-9a-fA-F]{4})
        )*+"""
    )
    _LONE_HALF = re.compile("[\ud800-\udfff]")

    __slots__ = ("_held", "_opened")

    def __init__(self) -> None:
        self._held = ""
        self._opened = False

    def push(self, text: str) -> str:
        """Take more of the string, which begins with its quote; return what it stands for."""
        if not self._opened:
            self._opened = True
            text = text[1:]
        text = self._held + text
        end = self._COMPLETE.match(text).end()  # type: ignore[union-attr]  # matches anywhere
        self._held = text[end:].removesuffix('"')
        decoded: str = json.loads(f'"{text[:end]}"', strict=False)
        return self._LONE_HALF.sub("\N{REPLACEMENT CHARACTER}", decoded)

    def finish(self) -> str:
        """The string has broken off: an escape that is not complete, as it stands."""
        held, self._held = self._held, ""
        return held
