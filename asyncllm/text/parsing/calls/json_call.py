"""Reads a call that is one JSON object with the name and the arguments in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from asyncllm.text.parsing.calls.output import NotACall
from asyncllm.text.parsing.json_value import JsonValue

if TYPE_CHECKING:
    from asyncllm.text.parsing.calls.output import CallOutput
    from asyncllm.text.parsing.formats import JsonBody
    from asyncllm.text.parsing.source import Emit, Markers, Source, Steps


class JsonCall:
    """One object. Its keys may come in any order: early arguments wait for the name."""

    def __init__(self, source: Source, calls: CallOutput, body: JsonBody):
        self._source = source
        self._calls = calls
        self._body = body
        self._name = ""
        self._early: list[str] | None = None  # arguments that came before the name
        self._started = False
        self._whole = False  # the arguments have been read
        self._has_others = False

    def read(self, stops: Markers) -> Steps[bool]:
        """Read the object; False if it breaks off. ``stops`` end arguments that are not JSON.

        Raises:
            NotACall: it does not fit, and no call has begun.
        """
        source = self._source
        try:
            closed = yield from self._object(stops)
        except NotACall:
            if not self._whole:
                raise
            closed = False
        if self._whole:
            rest = source.give_back()
            # A missing bracket is forgiven, as is one that the end of the text cuts off.
            if not closed and rest.strip() and (yield from source.peek()):
                self._calls.content(rest)
        return closed

    def _object(self, stops: Markers) -> Steps[bool]:
        source = self._source
        yield from self._punctuation("{")
        depth = 1  # of objects within which a name is a call's
        while depth:
            key = yield from self._string()
            yield from self._punctuation(":")
            yield from source.skip_space()
            if key in self._body.name_keys and (yield from source.take("{")):
                depth += 1
            elif not (yield from self._member(key, stops)):
                return False
            else:
                while depth and (yield from self._punctuation(",}")) == "}":
                    depth -= 1
        self._finish()
        return True

    def _member(self, key: str, stops: Markers) -> Steps[bool]:
        """Read the value of a key; False if the arguments were not whole."""
        body, calls = self._body, self._calls
        has_arguments = self._started or self._early is not None
        if key in body.name_keys and not self._name:
            self._name = calls.offered((yield from self._string()))
            if self._early is not None:
                self._start()("".join(self._early))
                self._end()
        elif key in body.argument_keys and not has_arguments:
            yield from calls.expect_value()
            if self._name:
                if not (yield from calls.arguments(self._start(), stops)):
                    return False
                self._end()
                return True
            self._early = []
            if not (yield from calls.arguments(self._early.append, None)):
                raise NotACall
        elif body.other_keys is not None and key not in body.other_keys:
            raise NotACall
        else:
            self._has_others = True
            if not (yield from self._source.json(JsonValue(), _drop)):
                raise NotACall
        return True

    def _finish(self) -> None:
        if self._started:
            return
        if self._body.needs_arguments or self._has_others or not self._name:
            raise NotACall
        self._start()("{}")
        self._end()

    def _start(self) -> Emit:
        self._started = True
        return self._calls.start(self._name)

    def _end(self) -> None:
        """The arguments are whole; keep the text after them, which is structure or content."""
        self._whole = True
        self._calls.end()
        self._source.keep()

    def _punctuation(self, chars: str) -> Steps[str]:
        """Consume whitespace and one of the characters."""
        yield from self._source.skip_space()
        char = yield from self._source.take(chars)
        if not char:
            raise NotACall
        return char

    def _string(self) -> Steps[str]:
        yield from self._source.skip_space()
        pieces: list[str] = []
        if (yield from self._source.peek()) != '"' or not (
            yield from self._source.json(JsonValue(), pieces.append)
        ):
            raise NotACall
        text: str = json.loads("".join(pieces), strict=False)
        return text


def _drop(text: str) -> None:
    """Discard a value of a key that is neither name nor arguments."""
