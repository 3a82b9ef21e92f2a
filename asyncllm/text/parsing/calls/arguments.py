"""Reads the arguments of one call, which are an object or stand for one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Sequence

from asyncllm.text.parsing.literal import Literal
from asyncllm.text.parsing.literal_atoms import QUOTES
from asyncllm.text.parsing.source import NO_MARKERS, Emit, Markers, Source, Steps

# What models write around a tool's name: where it is, and which call it is.
_PLACES = ("functions.", "tools.", "default_api.")
_NUMBER = re.compile(r":\d+\Z")
#: Values that mean no arguments.
_NOTHING = ("null", "[]")


class NotACall(Exception):
    """The text does not fit a call."""


class NotOffered(Exception):
    """The text was a call, read to its end, but not of a tool that was offered."""


def offered(name: str, tools: Container[str]) -> str | None:
    """The tool that is meant by a name; None if it was not offered."""
    for written in (name, _NUMBER.sub("", name)):
        bare = next((written.removeprefix(p) for p in _PLACES if written.startswith(p)), written)
        for each in (written, bare):
            if each in tools:
                return each
    return None


def written_names(tools: Iterable[str]) -> Markers:
    """What a model may write for the names of tools."""
    return Markers(place + name for name in tools for place in ("", *_PLACES))


def read_arguments(
    source: Source,
    start: Callable[[], Emit],
    *,
    stops: Markers = NO_MARKERS,
    quote: str = "",
    names: Sequence[str] = (),
    calls: Markers = NO_MARKERS,
) -> Steps[bool]:
    """Read a value and write the JSON object that it stands for; False if it breaks off.

    It is an object, the arguments of a call in Python, or a string with one of these in it; an
    empty string, an empty list and null stand for ``{}``.

    Args:
        start: begins the call and returns what takes its arguments.
        stops, quote, names, calls: as ``Literal`` has them.

    Raises:
        NotACall: it stands for no object.
    """
    char = yield from source.peek()
    if char and char in "{(":
        calls = calls if char == "(" else NO_MARKERS
        literal = Literal(
            source, start(), stops=stops, quote=quote, of_call=True, names=names, calls=calls
        )
        return (yield from literal.read())
    if char and char in QUOTES:
        return (yield from _in_string(source, start, stops))
    pieces: list[str] = []
    whole = yield from Literal(source, pieces.append, stops=stops).read()
    if not whole or "".join(pieces) not in _NOTHING:
        raise NotACall
    start()("{}")
    return True


def _in_string(source: Source, start: Callable[[], Emit], stops: Markers) -> Steps[bool]:
    """Read a string with the arguments in it, as it comes."""
    decoder = StringDecoder()
    inner = Source()
    reader = _read_inner(inner, start)
    done = False

    def push(text: str) -> None:
        nonlocal done
        inner.feed(decoder.push(text))
        done = done or next(reader, True) is True

    whole = yield from Literal(source, push, stops=stops).read()
    inner.end()
    done = done or next(reader, True) is True
    return whole


def _read_inner(source: Source, start: Callable[[], Emit]) -> Steps[None]:
    yield from source.skip_space()
    if (yield from source.peek()):
        yield from read_arguments(source, start)
    else:
        start()("{}")


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
        end = self._COMPLETE.match(text).end()  # type: ignore[union-attr]
        self._held = text[end:].removesuffix('"')
        decoded: str = json.loads(f'"{text[:end]}"', strict=False)
        return self._LONE_HALF.sub("\N{REPLACEMENT CHARACTER}", decoded)
