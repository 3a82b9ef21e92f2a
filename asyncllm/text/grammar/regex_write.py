"""Writes trees of regular expressions for the grammar library: in Rust's regex-syntax.

A tree is written for a plain text, or for the text as a JSON string holds it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.regex_tree import Alt, Cat, Chars, Node, Repeat

#: Characters that a JSON string holds escaped only.
_ESCAPED: Final = ('"', "\\", *map(chr, range(0x20)))
_SHORT_ESCAPES: Final = {
    **{"\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r"},
    **{'"': '"', "\\": "\\"},
}
#: Matches nothing.
_NO_CHAR: Final = "[a&&b]"


def write(node: Node, *, json: bool) -> str:
    """The regular expression of a tree without anchors, of the text or of its JSON form.

    In JSON each character has one form: as it is, or escaped where it must be. So the complement of
    a language stays one; and no lone surrogate can be written.
    """
    match node:
        case Chars():
            return _write_chars(node, json)
        case Cat(parts):
            return "".join([write(part, json=json) for part in parts])
        case Alt(()):
            return _NO_CHAR
        case Alt(options):
            return f"(?:{'|'.join([write(option, json=json) for option in options])})"
        case Repeat(inner, least, most):
            text = "" if most == 0 else write(inner, json=json)
            if not text:
                return ""
            counts = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((least, most))
            if counts is None:
                counts = f"{{{least},{'' if most is None else most}}}"
            return f"(?:{text}){counts}"
    raise AssertionError(f"not without anchors: {node}")


def quote(text: str) -> str:
    """A regular expression that matches just this text, in ASCII and without slashes."""
    return "".join([_code(ord(char)) for char in text])


def _code(code: int) -> str:
    plain = code < 0x80 and (chr(code).isalnum() or code == 0x20)
    return chr(code) if plain else f"\\x{{{code:x}}}"


_ESCAPED_CLASS: Final = quote('"\\') + "\\x{0}-\\x{1f}"


@lru_cache(maxsize=1024)  # the same few sets, such as any character, come again and again
def _write_chars(chars: Chars, json: bool) -> str:
    if not json:
        return _write_class(chars, "") or _NO_CHAR
    plain, escapes = _write_class(chars, _ESCAPED_CLASS), _write_escapes(chars)
    if plain and escapes:
        return f"(?:{plain}|{escapes})"
    return plain or escapes or _NO_CHAR


def _write_escapes(chars: Chars) -> str:
    """The escape sequences of the characters of a set that need one; "" for none."""
    short, long = "", ["", ""]
    for char in _ESCAPED:
        if not _holds(chars, char):
            continue
        if letter := _SHORT_ESCAPES.get(char):
            short += _code(ord(letter))
        else:
            long[ord(char) // 16] += f"{ord(char) % 16:x}"
    options = [f"[{short}]"] if short else []
    options += [f"u00{high}[{digits}]" for high, digits in enumerate(long) if digits]
    return rf"\x{{5c}}(?:{'|'.join(options)})" if options else ""


def _write_class(chars: Chars, without: str) -> str:
    """A bracketed class, minus the _ESCAPED characters if there are any in ``without``."""
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


def _holds(chars: Chars, char: str) -> bool:
    """Whether one of _ESCAPED is in a set."""
    code = ord(char)
    inside = any(low <= code <= high for low, high in chars.ranges) or any(
        (char in oracle.ascii_in(f"/\\p{{{name}}}/")) == holds for name, holds in chars.properties
    )
    return inside != chars.negated
