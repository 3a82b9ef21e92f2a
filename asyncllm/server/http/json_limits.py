"""How much a JSON text holds, found out without parsing it.

Whoever parses JSON keeps but one of two equal keys. So a value says all that its text says exactly
when it has as many strings, keys included; and strings are counted far faster than they are parsed.
"""

from __future__ import annotations

from functools import cache
from itertools import chain, compress
from operator import is_not
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from asyncllm.errors import BadRequest
from asyncllm.server.http.fields import may_hold_struct

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Strings, arrays and objects of one body. To make so many takes tens of milliseconds, in which the
#: event loop does nothing else. The most messages that are taken, 8192, may have 16 each.
MAX_PARTS: Final = 2**17
#: The same of all values, which are mostly numbers then: the token ids of prompts.
MAX_VALUES: Final = 5 * 2**18

#: From so many bytes on, numpy counts faster than bytes do.
_LONG: Final = 4096

#: Bytes of a text for each of its quotes, from which on its strings are long.
_SPARSE: Final = 32

_QUOTE, _COMMA, _BACKSLASH = b'",\\'

_encode = msgspec.json.Encoder().encode


def refuse_too_many(text: bytearray) -> None:
    """
    Raises:
        BadRequest: parsed, it would be more objects than the event loop can wait for.
    """
    # Each takes two bytes at least: its brackets or quotes, or a digit and a comma.
    if len(text) < 2 * MAX_PARTS:
        return
    if _too_many(text) is None:
        return
    # Some of that may be within strings.
    plain = bytes(text)
    if b"\\" in plain:
        plain = plain.replace(b"\\\\", b"").replace(b'\\"', b"")
    if _count_quotes(plain) <= 2 * MAX_PARTS:
        plain = b'""'.join(plain.split(b'"')[::2])
    if (problem := _too_many(plain)) is not None:
        raise BadRequest(problem)


def _too_many(text: bytes | bytearray) -> str | None:
    """What there is too much of in a text whose strings are empty; in others it only may be."""
    codes = np.frombuffer(text, np.uint8)
    parts = _count(codes == _QUOTE) // 2 + _count((codes | 0x20) == ord("{"))  # that is, { or [
    if parts > MAX_PARTS:
        return f"the body has more than {MAX_PARTS} strings, arrays and objects"
    if len(text) >= 2 * MAX_VALUES and _count(codes == _COMMA) > MAX_VALUES:
        return f"the body has more than {MAX_VALUES} values"
    return None


def says_all(value: msgspec.Struct | dict[str, Any], text: bytearray) -> bool:
    """Whether what was decoded from a JSON text has all of its keys and strings.

    What a Struct has by default does not count: it may be missing in the text.
    """
    quotes = _count_quotes(text)
    if quotes * _SPARSE > len(text) and not _hides_quotes(text):
        written = _count_written(value)
        if written is not None:
            return written == quotes
    found = 2 * _count_strings([value], quotes // 2)
    # A quote in a string is none of its own. To look for those takes longer than all the rest.
    return found == quotes or (b"\\" in text and found == quotes - _count_escaped_quotes(text))


def _count_written(value: msgspec.Struct | dict[str, Any]) -> int | None:
    """Quotes of a value that is written as JSON, a Struct without its defaults.

    That is far faster than to look at each string, unless these are long. None when there are
    Structs in the value, whose defaults would be written.
    """
    if isinstance(value, dict):
        return _count_quotes(_encode(value))
    values = msgspec.structs.astuple(value)
    given = list(map(is_not, values, _defaults(type(value))))
    if any(compress(_nesting(type(value)), given)):
        return None
    return 2 * sum(given) + _count_quotes(_encode(list(compress(values, given))))


def _hides_quotes(text: bytearray) -> bool:
    """Whether a string may have a quote that is none in the text."""
    if len(text) >= _LONG:
        codes = np.frombuffer(text, np.uint8)
        if not ((codes[:-1] == _BACKSLASH) & (codes[1:] == ord("u"))).any():
            return False
    return b"\\u0022" in text


def _count_quotes(text: bytes | bytearray) -> int:
    if len(text) < _LONG:
        return text.count(b'"')
    return _count(np.frombuffer(text, np.uint8) == _QUOTE)


def _count_escaped_quotes(text: bytearray) -> int:
    codes = np.frombuffer(text, np.uint8)
    slashes = codes[:-1] == _BACKSLASH
    if (slashes & (codes[1:] == _BACKSLASH)).any():  # one of them may be escaped itself
        return text.replace(b"\\\\", b"").count(b'\\"')
    return _count(slashes & (codes[1:] == _QUOTE))


def _count(found: np.ndarray[Any, Any]) -> int:
    return int(np.count_nonzero(found))


def _count_strings(level: list[Any], most: int) -> int:
    """Strings and keys, up to ``most``: level by level, which spares most of Python's own loops."""
    count = 0
    numbers: list[list[Any]] = []  # at least to begin with: long lists, which are looked at last
    while count < most and (level or numbers):
        if not level:
            mixed = (item for item in numbers if set(map(type, item)) != {int})
            level, numbers = list(chain.from_iterable(mixed)), []
        kinds = list(map(type, level))
        count += kinds.count(str)
        inside: list[Iterable[Any]] = []
        for kind in set(kinds):
            if kind is dict:
                dicts = [item for item in level if type(item) is dict]
                count += sum(map(len, dicts))
                inside += map(dict.values, dicts)
            elif kind is list:
                for item in level:
                    if type(item) is list and item:
                        (numbers if type(item[0]) is int else inside).append(item)
            elif issubclass(kind, msgspec.Struct):
                given = [_given(item) for item in level if type(item) is kind]
                count += sum(map(len, given))
                inside += given
        level = list(chain.from_iterable(inside))
    return count


def _given(struct: msgspec.Struct) -> list[Any]:
    """The values that were in the text for sure."""
    values = msgspec.structs.astuple(struct)
    return list(compress(values, map(is_not, values, _defaults(type(struct)))))


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[Any, ...]:
    fields = msgspec.structs.fields(kind)
    made = [field.name for field in fields if field.default_factory is not msgspec.NODEFAULT]
    assert not made, "a default that is made anew looks as if it had been given"
    return tuple(field.default for field in fields)


@cache
def _nesting(kind: type[msgspec.Struct]) -> tuple[bool, ...]:
    """Which fields may hold Structs."""
    return tuple(may_hold_struct(field.type) for field in msgspec.structs.fields(kind))
