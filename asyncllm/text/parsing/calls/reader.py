"""Reads one call, or a list of them, after the marker that opens it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from asyncllm.text.parsing.calls.json_call import JsonCall
from asyncllm.text.parsing.calls.output import NotACall
from asyncllm.text.parsing.calls.parameters import parameter_names, read_parameters
from asyncllm.text.parsing.calls.python_arguments import BreaksOff, NotPython, PythonArguments
from asyncllm.text.parsing.source import markers_of

if TYPE_CHECKING:
    from asyncllm.text.parsing.calls.output import CallOutput
    from asyncllm.text.parsing.formats import CallSyntax, JsonBody, NamedBody
    from asyncllm.text.parsing.outbox import Outbox
    from asyncllm.text.parsing.source import Markers, Source, Steps

_NAME = re.compile(r"[\w.:/-]+")
_MAX_NAME = 256
# Calls in Python stand on lines of their own; models write other signs as well.
_BETWEEN = re.compile(r"[ \t\r\n,;]+")
# Models often close one bracket too many; where a marker ends the call, that is recognizable.
_SURPLUS = re.compile(r"[ \t\r\n}\]]+")


class CallReader:
    """Reads calls of the tools that were offered; keeps their text until a call has begun."""

    def __init__(self, source: Source, out: Outbox, calls: CallOutput):
        self._source = source
        self._out = out
        self._calls = calls

    def read(self, call: CallSyntax, stops: Markers, lead: str, *, announced: bool) -> Steps[bool]:
        """Read what follows ``call.begin``, which is consumed.

        Args:
            stops: markers that end arguments which are not JSON.
            lead: text before ``call.begin`` that is content if this is not a call.
            announced: there was a marker of calls; without it, a bracket may begin an answer.

        Returns:
            Whether the last text read is markup; otherwise it is content.
        """
        source = self._source
        source.keep(lead + call.begin)
        try:
            yield from source.skip_space()
            opening = yield from source.peek()
            if call.json is not None and opening in ("{", "["):
                yield from self._json_calls(call, call.json, stops)
            elif call.named is not None:
                yield from self._named_call(call, call.named, stops)
            elif call.in_python:
                yield from self._python_calls(stops)
            else:
                raise NotACall
        except NotACall:
            if source.cut_off and announced:
                source.drop()  # half a call
                return True
            self._out.content(source.give_back())
            return False
        return not call.end or (yield from self._end(call.end))

    def _json_calls(self, call: CallSyntax, body: JsonBody, stops: Markers) -> Steps[None]:
        source = self._source
        is_list = yield from source.take("[")
        yield from source.skip_space()
        while (yield from JsonCall(source, self._calls, body).read(stops)):
            yield from source.skip_space()
            if not is_list or not (yield from source.take(",")):
                break
            source.keep(",")  # until the next call has begun
            yield from source.skip_space()
        if is_list:
            yield from source.skip_space()
            yield from source.take("]")

    def _end(self, markers: tuple[str, ...]) -> Steps[bool]:
        """Read the end of a call, as far as it is there; False if content was found."""
        source = self._source
        surplus = yield from source.run(_SURPLUS)
        after_surplus = source.consumed
        found = False
        for marker in markers:
            yield from source.skip_space()
            ending = markers_of(marker)
            found |= bool((yield from source.at(ending)) or (yield from source.breaks_off(ending)))
        if surplus.strip() and not found:
            text = surplus.rstrip()
            after = source.consumed - after_surplus + len(surplus) - len(text)
            self._out.content(text.lstrip(), after)
            return False
        return True

    def _named_call(self, call: CallSyntax, body: NamedBody, stops: Markers) -> Steps[None]:
        source = self._source
        yield from self._expect(body.head)
        yield from source.skip_space()
        calls = self._calls
        name = calls.offered((yield from source.run(_NAME, _MAX_NAME)), body.namespace)
        yield from source.skip_space()
        if body.call_id and (yield from source.at(markers_of(body.call_id))):
            yield from source.run(_NAME, _MAX_NAME)
        yield from self._expect(body.name_end)
        yield from source.skip_space()
        if call.end and (yield from source.at(markers_of(call.end[0]))):
            calls.without_arguments(name)
        elif body.parameters is None or (yield from source.peek()) == "{":
            yield from calls.expect_value()
            yield from calls.arguments(calls.start(name), stops)
        elif not (yield from source.at(markers_of(body.parameters.key_begin))):
            raise NotACall
        else:
            emit, schema = calls.start(name), calls.tools[name]
            if (yield from read_parameters(source, emit, body.parameters, schema, call.end)):
                calls.end()

    def _python_calls(self, stops: Markers) -> Steps[None]:
        source, calls = self._source, self._calls
        another = True
        while another:
            name = calls.offered((yield from source.run(_NAME, _MAX_NAME)))
            yield from source.skip_space()
            if not (yield from source.take("(")):
                raise NotACall
            emit, names = calls.start(name), parameter_names(calls.tools[name])
            try:
                yield from PythonArguments(source, emit, names).read()
            except BreaksOff:
                return
            except NotPython as found:
                if found.text:
                    emit(found.text)
                if not (yield from source.until(stops, emit)):
                    return
            calls.end()
            yield from source.run(_BETWEEN)
            source.keep()
            another = _NAME.match((yield from source.peek())) is not None

    def _expect(self, marker: str) -> Steps[None]:
        yield from self._source.skip_space()
        if marker and not (yield from self._source.at(markers_of(marker))):
            raise NotACall
