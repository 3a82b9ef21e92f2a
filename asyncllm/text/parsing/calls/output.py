"""Calls as they are read: the name that was offered, the arguments, the end."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from asyncllm.text.parsing.json_value import VALUE_FIRST, JsonValue, StringDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncllm.text.parsing.outbox import Outbox
    from asyncllm.text.parsing.source import Emit, Markers, Source, Steps

_NUMBER = re.compile(r":\d+\Z")  # of a call, after its name


class NotACall(Exception):
    """The text does not fit a call."""


class CallOutput:
    """Writes the calls of one text, of the tools that were offered.

    Attributes:
        tools: the schema of each tool's parameters, by the tool's name.
    """

    def __init__(self, source: Source, out: Outbox, tools: Mapping[str, Any]):
        self._source = source
        self._out = out
        self.tools = tools

    def offered(self, name: str, namespace: str = "") -> str:
        """The tool that is meant by a name.

        Raises:
            NotACall: it was not offered.
        """
        bare = name.removeprefix(namespace)
        for candidate in (name, bare, _NUMBER.sub("", bare)) if namespace else (name,):
            if candidate in self.tools:
                return candidate
        raise NotACall

    def start(self, name: str) -> Emit:
        """Begin a call, which cannot be taken back; returns what takes its arguments."""
        self._source.give_back()
        return self._out.start_call(name)

    def end(self) -> None:
        """The call that has begun is whole."""
        self._out.end_call()

    def without_arguments(self, name: str) -> None:
        """Write a whole call whose arguments are ``{}``."""
        self.start(name)("{}")
        self.end()

    def expect_value(self) -> Steps[None]:
        """Check that a JSON value begins here.

        Raises:
            NotACall: none does.
        """
        opening = yield from self._source.peek()
        if not opening or opening not in VALUE_FIRST:
            raise NotACall

    def arguments(self, emit: Emit, stops: Markers | None) -> Steps[bool]:
        """Read a JSON value as arguments; a string stands for its content.

        Text that is not JSON is passed on up to the next of the ``stops``.

        Returns:
            Whether it was a whole JSON value.

        Raises:
            NotACall: it is not JSON and there are no ``stops``.
        """
        source = self._source
        value = JsonValue()
        if (yield from source.peek()) == '"':
            decoder = StringDecoder()
            whole = yield from source.json(value, lambda text: emit(decoder.push(text)))
            emit(decoder.finish())
        else:
            whole = yield from source.json(value, emit)
        if value.failed:
            if stops is None:
                raise NotACall
            yield from source.until(stops, emit)
        if whole or value.failed:
            self.end()
        return whole

    def content(self, text: str) -> None:
        """Text that looked like markup is content."""
        self._out.content(text)
