"""Regular expressions as trees, and their languages written for the grammar library.

A tree may hold anchors; ``languages`` removes them. What is left is written as a regular expression
in the syntax of Rust's regex-syntax, of the plain text or of the text as a JSON string holds it.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

#: What a JSON string cannot hold as it is.
JSON_ESCAPED = ('"', "\\", *map(chr, range(0x20)))
_SHORT_ESCAPES = {"\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r", '"': '"', "\\": "\\"}


class RegexError(ValueError):
    """The pattern is malformed, or asks for what is not a regular language."""


@dataclass(frozen=True)
class Chars:
    """One character of a set.

    Attributes:
        ranges: inclusive code points.
        properties: Unicode properties as (name, whether it must hold).
        negated: the set is all the others.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    properties: tuple[tuple[str, bool], ...] = ()
    negated: bool = False

    def __contains__(self, char: str) -> bool:
        code = ord(char)
        inside = any(low <= code <= high for low, high in self.ranges) or any(
            _has_property(char, name) == holds for name, holds in self.properties
        )
        return inside != self.negated


@dataclass(frozen=True)
class Cat:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    node: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Anchor:
    """The begin or the end of the text."""

    at_begin: bool


@dataclass(frozen=True)
class Look:
    """A look-ahead at the very begin of a pattern: a second pattern for the same text."""

    node: Node
    positive: bool


Node: TypeAlias = Chars | Cat | Alt | Repeat | Anchor | Look

EMPTY = Cat(())
ANY = Chars(negated=True)
ANY_TEXT = Repeat(ANY, 0, None)


def has_anchor(node: Node) -> bool:
    match node:
        case Anchor() | Look():
            return True
        case Cat(parts) | Alt(parts):
            return any(map(has_anchor, parts))
        case Repeat(inner, _, _):
            return has_anchor(inner)
    return False


def _nullable(node: Node) -> bool:
    match node:
        case Chars():
            return False
        case Cat(parts):
            return all(map(_nullable, parts))
        case Alt(options):
            return any(map(_nullable, options))
        case Repeat(inner, least, _):
            return least == 0 or _nullable(inner)
    return True


@dataclass(frozen=True)
class _Placed:
    """A node without anchors, and whether the text must begin and end with it."""

    begins: bool
    node: Node
    ends: bool


def languages(pattern: Node) -> list[tuple[Node, bool]]:
    """The texts in which a pattern is found somewhere, as trees without anchors.

    Returns:
        Trees that the whole text must match (True) or must not (False); all of them hold together.

    Raises:
        RegexError: a look-ahead elsewhere than right behind a leading ``^``.
    """
    looks: list[Look] = []
    if isinstance(pattern, Cat) and pattern.parts[:1] == (Anchor(at_begin=True),):
        rest = list(pattern.parts[1:])
        while rest and isinstance(rest[0], Look):
            looks.append(rest.pop(0))  # type: ignore[arg-type]
        pattern = Cat((Anchor(at_begin=True), *rest))
    begin = Anchor(at_begin=True)
    looked = [(_found(Cat((begin, look.node))), look.positive) for look in looks]
    return [(_found(pattern), True), *looked]


def full_match(pattern: Node) -> Node:
    """The pattern that a text matches as a whole, as with an anchor at either end."""
    parts = pattern.parts if isinstance(pattern, Cat) else (pattern,)
    if parts[:1] == (Anchor(at_begin=True),):
        parts = parts[1:]
    return Cat((Anchor(at_begin=True), *parts, Anchor(at_begin=False)))


def _found(pattern: Node) -> Node:
    options: list[Node] = []
    for placed in _place(pattern):
        before = EMPTY if placed.begins else ANY_TEXT
        after = EMPTY if placed.ends else ANY_TEXT
        options.append(Cat((before, placed.node, after)))
    return options[0] if len(options) == 1 else Alt(tuple(options))


def _place(node: Node) -> list[_Placed]:
    if not has_anchor(node):
        return [_Placed(False, node, False)]
    match node:
        case Anchor(at_begin):
            return [_Placed(at_begin, EMPTY, not at_begin)]
        case Alt(options):
            return [placed for option in options for placed in _place(option)]
        case Cat(parts):
            found = [_Placed(False, EMPTY, False)]
            for part in _runs(parts):
                found = [
                    joined
                    for left in found
                    for right in _place(part)
                    if (joined := _join(left, right)) is not None
                ]
                if len(found) > 64:
                    raise RegexError("has too many alternatives with anchors")
            return found
        case Repeat(inner, 0, 1):
            return [_Placed(False, EMPTY, False), *_place(inner)]
        case Repeat(inner, 1, 1):
            return _place(inner)
        case Look():
            raise RegexError("has a look-ahead that is not at its very begin, after '^'")
    raise RegexError("has an anchor inside a repetition")


def _runs(parts: tuple[Node, ...]) -> list[Node]:
    """The same sequence with neighbours that have no anchor as one: joins nest no deeper then."""
    runs: list[Node] = []
    for anchored, group in groupby(parts, key=has_anchor):
        nodes = tuple(group)
        runs += nodes if anchored else (Cat(nodes),)
    return runs


def _join(left: _Placed, right: _Placed) -> _Placed | None:
    # Before a begin, and behind an end, there is only room for nothing.
    before, after = left.node, right.node
    if right.begins:
        if not _nullable(before):
            return None
        before = EMPTY
    if left.ends:
        if not _nullable(after):
            return None
        after = EMPTY
    return _Placed(left.begins or right.begins, Cat((before, after)), left.ends or right.ends)


class _Extent(NamedTuple):
    """Of one node: whether its length varies, its characters, and its ``spread``."""

    varies: bool
    size: int
    spread: int


def spread(node: Node) -> int:
    """At how many places of a tree a text may be at the same time, roughly."""
    return _extent(node).spread


def _extent(node: Node) -> _Extent:
    match node:
        case Chars():
            return _Extent(False, 1, 0)
        case Cat(parts):
            varies, size, places = False, 0, 0
            for part in map(_extent, parts):
                # Where what comes before varies in length, each character may be the next one.
                places += part.size if varies else part.spread
                varies, size = varies or part.varies, size + part.size
            return _Extent(varies, size, places)
        case Alt(options):
            found = [_extent(option) for option in options]
            size, places = sum(each.size for each in found), sum(each.spread for each in found)
            varies = any(each.varies for each in found) or len({each.size for each in found}) > 1
            return _Extent(varies, size, places)
        case Repeat(inner, least, most):
            each, count = _extent(inner), max(1, least if most is None else most)
            size = each.size * count
            inside = size if each.varies and count > 1 else each.spread
            return _Extent(least != most or each.varies, size, inside)
    return _Extent(False, 0, 0)


def write(node: Node, *, json: bool) -> str:
    """The regular expression of a tree without anchors, of the text or of its JSON form.

    In JSON each character has one form: as it is, or escaped where it must be. So the complement of
    a language stays one; and no lone surrogate can be written.
    """
    match node:
        case Chars():
            return _write_chars(node, json=json)
        case Cat(parts):
            return "".join(write(part, json=json) for part in parts)
        case Alt(()):
            return _NO_CHAR
        case Alt(options):
            return f"(?:{'|'.join(write(option, json=json) for option in options)})"
        case Repeat(inner, least, most):
            if most == 0:
                return ""
            text = write(inner, json=json)
            if not text:
                return ""
            counts = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((least, most))
            if counts is None:
                counts = f"{{{least},{'' if most is None else most}}}"
            return f"(?:{text}){counts}"
    raise AssertionError(f"not without anchors: {node}")


def json_escape(char: str) -> str:
    """The escape sequence of one of JSON_ESCAPED."""
    short = _SHORT_ESCAPES.get(char)
    return f"\\{short}" if short else f"\\u{ord(char):04x}"


def quote(text: str) -> str:
    """A regular expression that matches just this text, in ASCII and without slashes."""
    return "".join(_code(ord(char)) for char in text)


def _code(code: int) -> str:
    plain = code < 0x80 and (chr(code).isalnum() or code == 0x20)
    return chr(code) if plain else f"\\x{{{code:x}}}"


#: Matches nothing.
_NO_CHAR = "[a&&b]"
_ESCAPED_CLASS = quote('"\\') + "\\x{0}-\\x{1f}"


def _write_chars(chars: Chars, *, json: bool) -> str:
    if not json:
        return _write_class(chars, "") or _NO_CHAR
    if not chars.properties and not chars.negated and min(chars.ranges, default=(0, 0))[0] > 0x5C:
        return _write_class(chars, "") or _NO_CHAR
    escapes = [quote(json_escape(char)) for char in JSON_ESCAPED if char in chars]
    plain = _write_class(chars, _ESCAPED_CLASS)
    if not escapes:
        return plain or _NO_CHAR
    options = [*([plain] if plain else []), *escapes]
    return f"(?:{'|'.join(options)})"


def _write_class(chars: Chars, without: str) -> str:
    """A bracketed class, minus the JSON_ESCAPED characters if there are any in ``without``."""
    ranges = chars.ranges
    if without and not chars.negated:
        ranges = tuple(part for span in ranges for part in _minus_escaped(span))
    parts = [part for low, high in ranges for part in _minus_surrogates(low, high)]
    if len(parts) == 1 and parts[0][0] == parts[0][1] and not (chars.negated or chars.properties):
        return quote(chr(parts[0][0]))
    body = "".join(
        _code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in parts
    )
    for name, holds in chars.properties:
        named = f"\\{'p' if holds else 'P'}{{{name}}}"
        body += f"[{named}--[{without}]]" if without and not chars.negated else named
    if chars.negated:
        return f"[^{body}{without}]" if body or without else "[\\x{0}-\\x{10ffff}]"
    return f"[{body}]" if body else ""


def _minus_escaped(span: tuple[int, int]) -> list[tuple[int, int]]:
    bounds = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)]
    cut = [(max(span[0], low), min(span[1], high)) for low, high in bounds]
    return [(low, high) for low, high in cut if low <= high]


def _minus_surrogates(low: int, high: int) -> list[tuple[int, int]]:
    parts = [(low, min(high, 0xD7FF)), (max(low, 0xE000), high)]
    return [(first, last) for first, last in parts if first <= last]


def _has_property(char: str, name: str) -> bool:
    """Whether a character of JSON_ESCAPED has a property; these are punctuation and controls."""
    category = unicodedata.category(char)
    value = name.rpartition("=")[2]
    if value in {category, category[0], *_LONG_NAMES.get(category, ())}:
        return True
    return value in _ASCII_PROPERTIES.get(char, _ASCII_PROPERTIES[""])


_LONG_NAMES = {
    "Po": ("Punctuation", "punct", "Other_Punctuation"),
    "Cc": ("Other", "Control", "cntrl"),
}
_WHITE = ("White_Space", "space")
_EVERY = ("Any", "ASCII", "Common", "Zyyy", "Assigned")
_ASCII_PROPERTIES: dict[str, tuple[str, ...]] = {
    "": _EVERY,
    '"': (*_EVERY, "Quotation_Mark", "QMark", "Pattern_Syntax"),
    "\\": (*_EVERY, "Pattern_Syntax"),
    **dict.fromkeys("\t\n\v\f\r", (*_EVERY, *_WHITE, "Pattern_White_Space")),
}
