"""Reads a call that is one object with the name and the arguments in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import TypeAlias

from asyncllm.text.parsing.calls.arguments import NotACall, NotOffered, offered, read_arguments
from asyncllm.text.parsing.formats import JsonBody
from asyncllm.text.parsing.literal import Literal
from asyncllm.text.parsing.literal_atoms import LiteralString
from asyncllm.text.parsing.source import NO_MARKERS, Emit, Markers, Source, Steps

#: Begins a call of this name; returns what takes its arguments.
Start: TypeAlias = "Callable[[str], Emit]"
_KEY = re.compile(r"[\w-]+")


class JsonCall:
    """One object. Its keys may come in any order: early arguments wait for the name.

    Args:
        tools: the names that were offered.
        start, end: begin a call, and say that its arguments are whole.
        stops: markers that end the object, unless they are within a string.
    """

    def __init__(
        self,
        source: Source,
        body: JsonBody,
        tools: Container[str],
        start: Start,
        end: Callable[[], None],
        stops: Markers,
    ):
        self._source = source
        self._body = body
        self._tools = tools
        self._start_call = start
        self._end_call = end
        self._stops = stops
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments that came before the name
        self._begun = False
        self._whole = False  # the arguments have been read
        self._has_others = False

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
