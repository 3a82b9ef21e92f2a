"""Regular expressions as trees, and the languages of patterns as trees without anchors."""

from __future__ import annotations

import math
from itertools import groupby
from typing import NamedTuple, TypeAlias

import msgspec


class RegexError(ValueError):
    """The pattern is malformed, or not a regular language."""


class Chars(msgspec.Struct, frozen=True):
    """One character of a set.

    Attributes:
        ranges: inclusive code points.
        properties: Unicode properties as (name, whether it must hold).
        negated: the set is all the others.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    properties: tuple[tuple[str, bool], ...] = ()
    negated: bool = False


class Cat(msgspec.Struct, frozen=True):
    parts: tuple[Node, ...]


class Alt(msgspec.Struct, frozen=True):
    options: tuple[Node, ...]


class Repeat(msgspec.Struct, frozen=True):
    node: Node
    least: int
    most: int | None


class Anchor(msgspec.Struct, frozen=True):
    """The begin or the end of the text."""

    at_begin: bool


class Look(msgspec.Struct, frozen=True):
    """A look-ahead at the begin of a pattern: a second pattern for the same text."""

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


class _Placed(msgspec.Struct, frozen=True):
    """A node without anchors, and whether the text must begin and end with it."""

    begins: bool
    node: Node
    ends: bool


def languages(pattern: Node) -> list[tuple[Node, bool]]:
    """The texts in which a pattern is found somewhere, as trees without anchors.

    Returns:
        Trees that the whole text must match (True) or must not match (False), all together.

    Raises:
        RegexError: a look-ahead that is not right behind a leading ``^``.
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
    """The pattern with an anchor at either end."""
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
    """The sequence with neighbours without anchors as one node, which keeps joins shallow."""
    runs: list[Node] = []
    for anchored, group in groupby(parts, key=has_anchor):
        nodes = tuple(group)
        runs += nodes if anchored else (Cat(nodes),)
    return runs


def _join(left: _Placed, right: _Placed) -> _Placed | None:
    # Only the empty text fits before a begin or behind an end.
    before, after = left.node, right.node
    if right.begins:
        if least_length(before) > 0:
            return None
        before = EMPTY
    if left.ends:
        if least_length(after) > 0:
            return None
        after = EMPTY
    return _Placed(left.begins or right.begins, Cat((before, after)), left.ends or right.ends)


def least_length(node: Node) -> float:
    """Characters of the shortest text of a tree without anchors; infinite if there is none."""
    match node:
        case Chars():
            return 1 if _has_characters(node) else math.inf
        case Cat(parts):
            return sum(map(least_length, parts))
        case Alt(options):
            return min(map(least_length, options), default=math.inf)
        case Repeat(inner, least, _):
            return least * least_length(inner) if least else 0
    return math.inf


def _has_characters(chars: Chars) -> bool:
    """Whether a set has a character, surrogates aside; False when in doubt."""
    if chars.properties:
        return False
    if chars.negated:
        return sum(high - low + 1 for low, high in chars.ranges) < 0x110000 - 0x800
    return any(low <= high and not 0xD800 <= low <= high < 0xE000 for low, high in chars.ranges)


class _Extent(NamedTuple):
    """Whether the length of a node varies, its number of characters, and its ``spread``."""

    varies: bool
    size: int
    spread: int


def spread(node: Node) -> int:
    """Roughly, how many positions of a tree a text may be at simultaneously."""
    return _extent(node).spread


def _extent(node: Node) -> _Extent:
    match node:
        case Chars():
            return _Extent(False, 1, 0)
        case Cat(parts):
            varies, size, places = False, 0, 0
            for part in map(_extent, parts):
                # Behind a part of varying length, each character may be the next one.
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
