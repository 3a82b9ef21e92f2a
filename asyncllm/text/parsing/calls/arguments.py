"""Reads the arguments of a call, and calls that are one object with the name and the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncllm.text.parsing.formats import JsonBody
from asyncllm.text.parsing.literal import Literal
from asyncllm.text.parsing.literal_atoms import QUOTES, LiteralString
from asyncllm.text.parsing.source import NO_MARKERS, Emit, Markers, Source, Steps

# What models write around a tool's name: where it is, and which call it is.
_PLACES = ("functions.", "tools.", "default_api.")
_NUMBER = re.compile(r":\d+\Z")
#: Values that mean no arguments.
_NOTHING = ("null", "[]")
#: Begins a call of this name; returns what takes its arguments.
Start: TypeAlias = "Callable[[str], Emit]"
_KEY = re.compile(r"[\w-]+")


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
    inner = Source()
    reader = _read_inner(inner, start)
    done = False

    def push(text: str) -> None:  # whole escapes, or a quote around the string
        nonlocal done
        inner.feed("" if text == '"' else json.loads(f'"{text}"'))
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


@dataclass(slots=True, eq=False)
class JsonCall:
    """One object. Its keys may come in any order: early arguments wait for the name.

    Args:
        tools: the names that were offered.
        start_call, end_call: begin a call, and say that its arguments are whole.
        stops: markers that end the object, unless they are within a string.
    """

    _source: Source
    _body: JsonBody
    _tools: Container[str]
    _start_call: Start
    _end_call: Callable[[], None]
    _stops: Markers
    _name: str | None = None
    _early: list[str] | None = None  # arguments that came before the name
    _begun: bool = False
    _whole: bool = False  # the arguments have been read
    _has_others: bool = False

    def read(self) -> Steps[bool]:
        """Read the object; False if what follows the arguments is not part of it, and is left.

        Raises:
            NotACall: it does not fit, and no call has begun.
            NotOffered: it is a call of another tool.
        """
        source = self._source
        fits = True
        try:
            yield from self._object()
        except NotACall:
            if not self._whole:
                raise
            # A missing bracket is forgiven, as is one that the end of the text cuts off.
            char = yield from source.peek()
            fits = not char or char in "]{" or (yield from source.sees(self._stops))
        if fits:
            source.unmark()
        else:
            source.rewind()
        if self._name not in self._tools:
            raise NotOffered
        return fits

    def _object(self) -> Steps[None]:
        source = self._source
        yield from self._punctuation("{")
        depth = 1  # of objects within which a name is a call's
        while depth:
            key = yield from self._string()
            yield from self._punctuation(":")
            yield from source.skip_space()
            if key in self._body.name_keys and (yield from source.take("{")):
                depth += 1
                continue
            yield from self._member(key)
            while depth and (yield from self._punctuation(",}")) == "}":
                depth -= 1
        if not self._begun:
            if self._body.needs_arguments or self._has_others or self._name is None:
                raise NotACall
            self._start()("{}")
            self._end()

    def _member(self, key: str) -> Steps[None]:
        """Read the value of a key."""
        body, source = self._body, self._source
        if body.keyed and self._name is None and (name := offered(key, self._tools)):
            self._name, key = name, body.argument_keys[0]
        if key in body.name_keys and self._name is None:
            written = yield from self._string()
            self._name = offered(written, self._tools) or written
            if self._early is not None:
                self._start()("".join(self._early))
                self._end()
        elif key in body.argument_keys and not self._begun and self._early is None:
            if self._name is not None:
                whole = yield from read_arguments(source, self._start, stops=self._stops)
                if whole or (yield from source.peek()):
                    self._end()
                else:
                    self._whole = True
                    source.mark()
                return
            early = self._early = list[str]()
            yield from read_arguments(source, lambda: early.append, stops=self._stops)
        elif body.other_keys is not None and key not in body.other_keys:
            raise NotACall
        else:
            self._has_others = True
            if not (yield from Literal(source, _drop, stops=self._stops).read()):
                raise NotACall

    def _start(self) -> Emit:
        assert self._name is not None
        self._begun = True
        return self._start_call(self._name) if self._name in self._tools else _drop

    def _end(self) -> None:
        """The arguments are whole; what follows is structure or content."""
        self._whole = True
        if self._name in self._tools:
            self._end_call()
        self._source.mark()

    def _punctuation(self, chars: str) -> Steps[str]:
        """Consume whitespace and one of the characters."""
        yield from self._source.skip_space()
        char = yield from self._source.take(chars)
        if not char:
            raise NotACall
        return char

    def _string(self) -> Steps[str]:
        """Read a string, or a key without quotes."""
        yield from self._source.skip_space()
        strings = LiteralString(self._source, self._stops, NO_MARKERS)
        char = yield from self._source.peek()
        if not char or not (yield from strings.opens(char)):
            if key := (yield from self._source.run(_KEY)):
                return key
            raise NotACall
        pieces: list[str] = []
        if not (yield from strings.read(pieces.append, in_python=False, followed_by="")):
            raise NotACall
        text: str = json.loads("".join(pieces))
        return text


def _drop(text: str) -> None:
    """Discard arguments of a tool that was not offered, or the value of another key."""
