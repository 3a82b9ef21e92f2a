"""Parses regular expressions in the dialect of JSON Schema: ECMA 262, with Unicode on.

Syntax: https://262.ecma-international.org/14.0/#sec-patterns. Back-references and look-behinds are
refused: they are not regular, or not worth their cost.
"""

from __future__ import annotations

import re

from asyncllm.text.grammar.limits import (
    MAX_GROUP_DEPTH,
    MAX_OPTIONAL_PARTS,
    MAX_PATTERN_CHARS,
    MAX_REPEAT,
)
from asyncllm.text.grammar.regex_tree import (
    EMPTY,
    Alt,
    Anchor,
    Cat,
    Chars,
    Look,
    Node,
    RegexError,
    Repeat,
)

_DIGITS = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_QUANTIFIER = re.compile(r"\{(\d+)(,?)(\d*)\}")
_GROUP_OPEN = re.compile(r"\?(?:(:)|(=)|(!)|P?<([A-Za-z_]\w*)>)", re.ASCII)
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"([pP])\{([A-Za-z0-9_]+(?:=[A-Za-z0-9_]+)?)\}")


def parse(pattern: str) -> Node:
    """The tree of a pattern.

    Raises:
        RegexError: it is malformed, too large, or has something that is not supported; the message
            goes behind the words "the pattern".
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise RegexError(f"is longer than {MAX_PATTERN_CHARS} characters")
    return _Parser(pattern).parse()


class _Parser:
    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._depth = 0
        self._optional_parts = 0

    def parse(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error("has an unmatched ')'")
        return node

    def _error(self, problem: str) -> RegexError:
        return RegexError(f"{problem} at character {self._at}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise self._error("ends too early")
        self._at += 1
        return char

    def _match(self, regex: re.Pattern[str]) -> re.Match[str] | None:
        found = regex.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        if len(options) == 1:
            return options[0]
        if EMPTY in options:
            self._count_optional()
        return Alt(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else Cat(tuple(parts))

    def _quantified(self, atom: Node) -> Node:
        char = self._peek()
        if char and char in "*+?":
            self._at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif found := self._match(_QUANTIFIER):
            least = int(found[1][:9])
            most = least if not found[2] else int(found[3][:9]) if found[3] else None
            if least > MAX_REPEAT or (most or 0) > MAX_REPEAT:
                raise self._error(f"repeats more than {MAX_REPEAT} times")
            if most is not None and most < least:
                raise self._error("has a quantifier out of order")
        else:
            return atom
        if isinstance(atom, Anchor | Look):
            raise self._error("repeats an assertion")
        if self._peek() == "?":
            self._at += 1  # lazy or not, the language is the same
        following = self._peek()
        if (following and following in "*+?") or _QUANTIFIER.match(self._text, self._at):
            raise self._error("has nothing to repeat")
        if least != most:
            self._count_optional()
        return Repeat(atom, least, most)

    def _count_optional(self) -> None:
        self._optional_parts += 1
        if self._optional_parts > MAX_OPTIONAL_PARTS:
            raise RegexError(
                f"has more than {MAX_OPTIONAL_PARTS} parts that may be missing or repeat"
            )

    def _atom(self) -> Node:
        char = self._take()
        match char:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return Chars(_LINE_ENDS, negated=True)
            case "^" | "$":
                return Anchor(at_begin=char == "^")
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise self._error("has nothing to repeat")
        if char == "{" and _QUANTIFIER.match(self._text, self._at - 1):
            raise self._error("has nothing to repeat")
        return _single(self._scalar(char))

    def _scalar(self, char: str) -> int:
        code = ord(char)
        if 0xD800 <= code < 0xE000:
            raise self._error("has an unpaired surrogate")
        return code

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise self._error(f"nests more than {MAX_GROUP_DEPTH} groups")
        opened = None
        if self._peek() == "?":
            opened = self._match(_GROUP_OPEN)
            if opened is None:
                kind = self._text[self._at : self._at + 3]
                what = "a look-behind" if kind[1:2] == "<" else f"the group '({kind[:2]}'"
                raise self._error(f"has {what}, which is not supported,")
        node = self._alternatives()
        if self._peek() != ")":
            raise self._error("lacks a ')'")
        self._at += 1
        self._depth -= 1
        if opened and (opened[2] or opened[3]):
            return Look(node, positive=bool(opened[2]))
        return node if node != Cat(()) else EMPTY

    def _escape(self) -> Node:
        if (following := self._peek()) and following in "bB":
            raise self._error("has a word boundary, which is not supported,")
        found = self._class_escape()
        return found if isinstance(found, Chars) else _single(found)

    def _class_escape(self) -> Chars | int:
        """A set, or one code point; the backslash has been taken."""
        if found := self._match(_PROPERTY):
            return Chars(properties=((found[2], found[1] == "p"),))
        if found := self._match(_HEX):
            return self._unicode(int(found[1] or found[2] or found[3], 16))
        char = self._take()
        if char.lower() in _SETS:
            return Chars(_SETS[char.lower()], negated=char.isupper())
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "0" and not self._peek().isdecimal():
            return 0
        if char == "c" and self._peek().isascii() and self._peek().isalpha():
            return ord(self._take()) % 32
        if char.isdecimal() or char == "k":
            raise self._error("has a back-reference, which is not supported,")
        if char.isascii() and char.isalnum():
            raise self._error(f"has the unknown escape '\\{char}'")
        return self._scalar(char)

    def _unicode(self, code: int) -> int:
        if 0xD800 <= code < 0xDC00 and self._text.startswith("\\u", self._at):
            low = _HEX.match(self._text, self._at + 1)
            if low and low[2] and 0xDC00 <= int(low[2], 16) < 0xE000:
                self._at = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + int(low[2], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self._error("has an escape that is no character")
        return code

    def _class(self) -> Node:
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        properties: list[tuple[str, bool]] = []
        while self._peek() != "]":
            first = self._class_member()
            if isinstance(first, Chars):
                self._add(first, ranges, properties)
                continue
            last = first
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                end = self._class_member()
                if isinstance(end, Chars) or end < first:
                    raise self._error("has a range out of order")
                last = end
            ranges.append((first, last))
        self._at += 1
        return Chars(tuple(ranges), tuple(properties), negated)

    def _add(
        self, chars: Chars, ranges: list[tuple[int, int]], properties: list[tuple[str, bool]]
    ) -> None:
        if chars.negated:
            at = 0
            for low, high in chars.ranges:
                ranges.append((at, low - 1))
                at = high + 1
            ranges.append((at, 0x10FFFF))
        else:
            ranges.extend(chars.ranges)
            properties.extend(chars.properties)

    def _class_member(self) -> Chars | int:
        char = self._take()
        if char != "\\":
            return self._scalar(char)
        if self._peek() == "b":
            self._at += 1
            return 0x08
        if self._peek() == "-":
            self._at += 1
            return ord("-")
        return self._class_escape()


def _single(code: int) -> Chars:
    return Chars(((code, code),))
