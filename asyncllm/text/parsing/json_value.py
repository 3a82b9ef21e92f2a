"""JSON in pieces: finds where a value ends, and decodes a string."""

from __future__ import annotations

import json
import re

#: Characters that a JSON value can begin with.
VALUE_FIRST = '{["-0123456789tfn'

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_RUN = re.compile(r'[^"\\]*')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSER = {"{": "}", "[": "]"}
#: What may come outside of strings, literals and numbers -> the characters with which it begins.
_FIRST = {
    "value": VALUE_FIRST,
    "first item": VALUE_FIRST + "]",
    "first key": '"}',
    "key": '"',
    "colon": ":",
    "after value": ",]}",
}

# RFC 8259's number as a table: state -> class of character -> state. A number may end where the
# state is one of _NUMBER_ENDS.
_NUMBER = {
    "sign": {"0": "zero", "1": "int"},
    "zero": {".": "point", "e": "e"},
    "int": {"0": "int", "1": "int", ".": "point", "e": "e"},
    "point": {"0": "frac", "1": "frac"},
    "frac": {"0": "frac", "1": "frac", "e": "e"},
    "e": {"-": "e_sign", "+": "e_sign", "0": "exp", "1": "exp"},
    "e_sign": {"0": "exp", "1": "exp"},
    "exp": {"0": "exp", "1": "exp"},
}
_NUMBER_ENDS = frozenset({"zero", "int", "frac", "exp"})
_NUMBER_CLASS = {**dict.fromkeys("123456789", "1"), "E": "e"}


class JsonValue:
    """One JSON value, followed through text that comes in pieces.

    It reads RFC 8259, and control characters within strings: models write line breaks there.
    Nesting may be of any depth.

    Attributes:
        done: the value has ended. A number, which has no end of its own, is done when something
            else follows.
        failed: the next character cannot be there.
    """

    __slots__ = (
        "_closers", "_expects", "_is_key", "_literal", "_number", "_string", "done", "failed",
    )  # fmt: skip

    def __init__(self) -> None:
        self._expects = "value"  # a key of _FIRST
        self._closers: list[str] = []  # of the open arrays and objects, innermost last
        self._string = ""  # "string", "escape", or the number of hexadecimal digits to come
        self._is_key = False  # the string is one
        self._literal = ""  # the rest of it
        self._number = ""  # a state in _NUMBER
        self.done = False
        self.failed = False

    def scan(self, text: str, pos: int) -> int:
        """Read on from ``pos``.

        Returns the end of the text, or that of the value when ``done``, or the position of the
        wrong character when ``failed``.
        """
        while pos < len(text) and not self.done and not self.failed:
            if self._string:
                pos = self._scan_string(text, pos)
            elif self._number:
                pos = self._scan_number(text, pos)
            elif self._literal:
                pos = self._scan_literal(text, pos)
            else:
                pos = self._scan_structure(text, _end(_SPACE, text, pos))
        return pos

    def _scan_structure(self, text: str, pos: int) -> int:
        if pos == len(text):
            return pos
        char = text[pos]
        closes = char in "]}" and self._closers[-1:] == [char]
        if char not in _FIRST[self._expects] or (char in "]}" and not closes):
            return self._fail(pos)
        if closes:
            self._closers.pop()
            self._end_value()
        elif char == ":":
            self._expects = "value"
        elif char == ",":
            self._expects = "key" if self._closers[-1] == "}" else "value"
        elif char == '"':
            self._is_key = self._expects in ("key", "first key")
            self._string = "string"
        elif closer := _CLOSER.get(char):
            self._closers.append(closer)
            self._expects = "first key" if char == "{" else "first item"
        elif literal := _LITERALS.get(char):
            self._literal = literal[1:]
        else:
            self._number = {"-": "sign", "0": "zero"}.get(char, "int")
        return pos + 1

    def _scan_string(self, text: str, pos: int) -> int:
        char = text[pos]
        if self._string == "string":
            pos = _end(_STRING_RUN, text, pos)
            if pos == len(text):
                return pos
            if text[pos] == "\\":
                self._string = "escape"
            else:
                self._string = ""
                if self._is_key:
                    self._expects = "colon"
                else:
                    self._end_value()
        elif self._string == "escape":
            if char not in '"\\/bfnrtu':
                return self._fail(pos)
            self._string = "4" if char == "u" else "string"
        elif char not in "0123456789abcdefABCDEF":
            return self._fail(pos)
        else:
            self._string = "string" if self._string == "1" else str(int(self._string) - 1)
        return pos + 1

    def _scan_literal(self, text: str, pos: int) -> int:
        if text[pos] != self._literal[0]:
            return self._fail(pos)
        self._literal = self._literal[1:]
        if not self._literal:
            self._end_value()
        return pos + 1

    def _scan_number(self, text: str, pos: int) -> int:
        following = _NUMBER[self._number].get(_NUMBER_CLASS.get(text[pos], text[pos]))
        if following is not None:
            self._number = following
            return pos + 1
        if self._number not in _NUMBER_ENDS:
            return self._fail(pos)
        self._number = ""
        self._end_value()
        return pos

    def _end_value(self) -> None:
        self._expects = "after value"
        self.done = not self._closers

    def _fail(self, pos: int) -> int:
        self.failed = True
        return pos


def _end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    """The end of the run that a pattern, which may match nothing, matches from ``pos`` on."""
    return pattern.match(text, pos).end()  # type: ignore[union-attr]


class StringDecoder:
    """Decodes a JSON string as its text comes in. The text is known to be well-formed.

    An escape is decoded when it is complete, a surrogate pair as one; a lone surrogate becomes
    U+FFFD.
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
        """Take more of the string, which begins with its quote; return what could be decoded."""
        if not self._opened:
            self._opened = True
            text = text[1:]
        text = self._held + text
        end = _end(self._COMPLETE, text, 0)
        self._held = text[end:].removesuffix('"')
        decoded: str = json.loads(f'"{text[:end]}"', strict=False)
        return self._LONE_HALF.sub("\N{REPLACEMENT CHARACTER}", decoded)

    def finish(self) -> str:
        """The string has broken off: return an incomplete escape as it was written."""
        held, self._held = self._held, ""
        return held
