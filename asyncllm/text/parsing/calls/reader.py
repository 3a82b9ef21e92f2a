"""Reads one call, or several in a row, after the marker that opens them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncllm.text.parsing.calls.arguments import (
    JsonCall,
    NotACall,
    NotOffered,
    offered,
    read_arguments,
    written_names,
)
from asyncllm.text.parsing.calls.parameters import ParameterReader
from asyncllm.text.parsing.calls.typed import parameter_names
from asyncllm.text.parsing.events import Outbox
from asyncllm.text.parsing.formats import CallSyntax, NamedBody, ToolFormat
from asyncllm.text.parsing.literal import Literal
from asyncllm.text.parsing.literal_atoms import QUOTES
from asyncllm.text.parsing.source import NO_MARKERS, Emit, Markers, Source, Steps, markers_of

_NAME = re.compile(r"[\w.:/-]+")
_MAX_NAME = 256
# Between calls in brackets, or in Python; models write other signs as well.
_BETWEEN = re.compile(r"[ \t\r\n,;]+")
# Models often close one bracket too many; where a marker ends the call, that is recognizable.
_SURPLUS = re.compile(r"[ \t\r\n}\]`]+")
_FENCE = markers_of("```json", "```")  # which some models write within their markers


class Answer(Exception):
    """What is written like a call says that content follows."""


class CallReader:
    """Reads calls of the tools that were offered; keeps their text until a call has begun.

    What is written like a call but cannot be read, or is of another tool, is read to its end, and
    is content without its markup. The calls beside it are calls all the same.

    Args:
        tools: the schema of each tool's parameters, by the tool's name.
    """

    def __init__(self, source: Source, out: Outbox, tools: Mapping[str, Any], form: ToolFormat):
        self._source = source
        self._out = out
        self._tools = tools
        self._form = form
        # What ends arguments that break off: the end of a call, or the next one.
        self._stops = markers_of(*filter(_may_stop, form.outer_markers()))
        in_python = any(call.named is not None and call.named.in_python for call in form.calls)
        names = written_names(tools).texts if in_python else ()
        self._python_calls = Markers(f"{name}(" for name in names)
        # Content, with its place in the text, that belongs before the next call.
        self._refused: list[tuple[int, str]] = []
        self._marked = 0  # where the text that is not decided begins
        self._undecided = False  # there is a mark at the beginning as well: all may be an answer

    def read(self, call: CallSyntax, lead: str, *, announced: bool) -> Steps[bool | None]:
        """Read what follows ``call.begin``, which is consumed.

        Args:
            lead: text before ``call.begin`` that is content if content follows.
            announced: there was a marker of calls; without it, a bracket may begin an answer.

        Returns:
            Whether the last text read is markup and not content; None if there is no call, and
            nothing has been consumed.
        """
        source, out = self._source, self._out
        first, begin = out.calls, source.consumed
        self._refused.clear()
        self._undecided = call.is_loose
        if self._undecided:
            source.mark()
        self._mark()
        try:
            fits = yield from self._calls(call)
        except Answer:
            self._settle()
            return True
        except NotACall:
            if source.cut_off and announced:  # half a call
                self._settle()
                source.drop()
                return True
            source.rewind()
            if self._undecided:
                source.unmark()
            return None
        if self._undecided:
            source.rewind()
            return None
        if out.calls == first:
            out.content(lead, source.consumed - begin + len(call.begin))
        shown = bool(self._refused)
        self._show_refused()
        return (not fits or (yield from self._end(call.closing))) and not shown

    def _calls(self, call: CallSyntax) -> Steps[bool]:
        """Read calls in a row; False if what follows the last is not part of it.

        Raises:
            NotACall: the first is none.
            Answer: nor is it to be one.
        """
        source = self._source
        yield from source.skip_space()
        if not call.is_loose and (yield from source.at(_FENCE)):
            yield from source.skip_space()
        is_list = bool(call.may_be_list and (yield from source.take("[")))
        yield from source.skip_space()
        if is_list and not call.is_loose and (yield from source.take("]")):
            source.unmark()  # no calls at all
            return True
        fits = yield from self._one(call)
        while fits and (yield from self._another(call, is_list=is_list)):
            try:
                fits = yield from self._one(call)
            except NotACall:
                fits = source.cut_off and not self._undecided
                if not fits:
                    source.rewind()
                    break
                source.unmark()  # half a call
                source.drop()
        return fits

    def _one(self, call: CallSyntax) -> Steps[bool]:
        """Read one call, or what is refused; False if what follows is not part of it.

        Raises:
            NotACall: it is neither; its text is still marked.
        """
        source = self._source
        begin, opening = source.consumed, (yield from source.peek())
        try:
            if opening == "{" and call.json is not None:
                start, end = self._start, self._out.end_call
                reader = JsonCall(source, call.json, self._tools, start, end, self._stops)
                return (yield from reader.read())
            if call.named is None:
                raise NotACall
            yield from self._named_call(call, call.named)
            return True
        except NotOffered:
            text = source.unmark()[begin - self._marked :]
        except NotACall:
            if call.is_loose or opening != "{" or source.cut_off:
                raise
            source.rewind(begin - self._marked)
            source.mark()
            yield from Literal(source, _drop, stops=self._stops).read()
            text = source.unmark()
        self._refused.append((begin, text))
        return True

    def _another(self, call: CallSyntax, *, is_list: bool) -> Steps[bool]:
        """Whether one more call follows, up to which the text is marked then.

        Otherwise consume what closes the list, if anything does.
        """
        source = self._source
        self._mark()
        yield from source.run(_BETWEEN)
        char = yield from source.peek()
        if char == "{" and call.json is not None and (is_list or call.begin):
            return True
        if (named := call.named) is not None and (call.begin or named.in_python):
            if named.head:
                follows = yield from source.sees(markers_of(named.head))
            else:
                follows = _NAME.match(char) is not None
                if follows and not named.in_python:
                    follows = yield from source.sees(written_names(self._tools))
            if follows:
                return True
        if is_list and (not char or char == "]"):
            yield from source.take("]")
            source.unmark()
        else:
            source.rewind()
        return False

    def _end(self, markers: tuple[str, ...]) -> Steps[bool]:
        """Read the end of a call, as far as it is there; False if content was found."""
        source = self._source
        if not markers:
            return True
        yield from source.skip_space()
        surplus = ""
        if not (yield from source.sees(markers_of(*markers))):
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

    def _named_call(self, call: CallSyntax, body: NamedBody) -> Steps[None]:
        source = self._source
        yield from source.skip_space()
        if (head := markers_of(body.head)).texts and not (yield from source.at(head)):
            yield from source.run(_NAME, _MAX_NAME)
            yield from source.skip_space()
            if not (yield from source.at(head)):
                raise NotACall
        yield from source.skip_space()
        yield from source.take(QUOTES)
        written = yield from source.run(_NAME, _MAX_NAME)
        if not written:
            raise NotACall
        yield from source.take(QUOTES)
        if written == body.answer:
            raise Answer
        name_end = body.name_end
        if (like_name := _NAME.match(name_end)) and written.endswith(like_name[0]):
            written, name_end = written[: -like_name.end()], name_end[like_name.end() :]
        name = offered(written, self._tools)
        yield from source.skip_space()
        if body.call_id and (yield from source.at(markers_of(body.call_id))):
            yield from source.run(_NAME, _MAX_NAME)
        divided = not name_end or bool((yield from source.at(markers_of(name_end))))
        yield from source.skip_space()
        yield from self._arguments(call, body, name, divided=divided)
        if name is None:
            raise NotOffered

    def _arguments(
        self, call: CallSyntax, body: NamedBody, name: str | None, *, divided: bool
    ) -> Steps[None]:
        """Read the arguments of a call; ``divided``: its name has ended as it should."""
        source, out = self._source, self._out

        def start() -> Emit:
            return _drop if name is None else self._start(name)

        schema = self._tools.get(name or "")
        opening = yield from source.peek()
        style = body.parameters
        bracket = "(" if body.in_python else "{"
        if opening == bracket or (opening and opening in QUOTES and divided):
            whole = yield from read_arguments(
                source,
                start,
                stops=self._stops,
                quote=body.quote,
                names=parameter_names(schema),
                calls=self._python_calls if body.in_python else NO_MARKERS,
            )
        elif (
            style
            and not (yield from source.sees(markers_of(*call.closing)))
            and (yield from source.at(markers_of(style.key_begin)))
        ):
            parameters = ParameterReader(source, start(), call, style, schema, self._stops)
            whole = yield from parameters.read()
        elif divided and not call.is_loose and (yield from self._ends(call, opening)):
            start()("{}")
            whole = True
        else:
            raise NotACall
        if name is not None and (whole or (yield from source.peek())):
            out.end_call()

    def _ends(self, call: CallSyntax, opening: str) -> Steps[bool]:
        """Whether a call ends before its arguments, which it need not have."""
        source = self._source
        if opening:
            ends = markers_of(*self._stops.texts, *call.closing)
            return (yield from source.sees(ends))
        return not source.cut_off

    def _start(self, name: str) -> Emit:
        """Begin a call, which cannot be taken back."""
        self._show_refused()
        self._settle()
        return self._out.start_call(name)

    def _mark(self) -> None:
        self._marked = self._source.consumed
        self._source.mark()

    def _settle(self) -> None:
        """The text that was not decided is markup."""
        self._source.unmark()
        if self._undecided:
            self._source.unmark()
            self._undecided = False

    def _show_refused(self) -> None:
        for at, text in self._refused:
            for start, piece in self._form.without_markup(text):
                end = at + start + len(piece)
                self._out.content(piece, self._source.consumed - end)
        self._refused.clear()


def _may_stop(marker: str) -> bool:
    """Whether a marker can be told from what a value consists of."""
    return len(marker) > 1 and marker[0] not in (*QUOTES, "\\")


def _drop(text: str) -> None:
    """Discard arguments of a tool that was not offered."""
