"""Reads texts in which tags mark reasoning and calls, and the rest is content."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncllm.text.parsing.calls.arguments import written_names
from asyncllm.text.parsing.calls.reader import CallReader
from asyncllm.text.parsing.events import Outbox
from asyncllm.text.parsing.formats import CallSyntax, ReasoningFormat, ToolFormat, is_tag
from asyncllm.text.parsing.source import NO_MARKERS, SPACE, Markers, Source, Steps, markers_of

_OPENING = "{["
_CLOSING = "]}"


class TaggedReader:
    """Reads a whole text.

    Reasoning comes first or not at all: after content or a call, its marker and that of the answer
    are text. Within reasoning, its end is markup, and calls are if the answer ends with them. So is
    its end at the very beginning, or straight after a call.
    Whitespace after markup belongs to the markup, and so does whitespace at the very beginning if
    markup follows. Markers of calls that belong to no call are left out.

    Attributes:
        in_reasoning: whether the text now being read is reasoning.
        reasoning_end: characters up to the end of the reasoning, once it is there.
    """

    def __init__(
        self,
        source: Source,
        out: Outbox,
        tools: ToolFormat | None,
        schemas: Mapping[str, Any],
        reasoning: ReasoningFormat | None,
    ):
        """Take the formats, and the schemas of the tools that were offered."""
        self._source = source
        self._out = out
        self._calls = None if tools is None else CallReader(source, out, schemas, tools)
        self._tools = tools
        self._reasoning = reasoning
        self._answer = reasoning.answer if reasoning else ()
        self._openings = (*reasoning.begins, *self._answer[:1]) if reasoning else ()
        self._calls_by_begin = {call.begin: call for call in tools.calls} if tools else {}
        self._bare = self._calls_by_begin.pop("", None)
        outer = (*filter(is_tag, tools.outer_markers()), *tools.ignored) if tools else ()
        self._take_markup({*self._calls_by_begin, *outer})
        self._names = NO_MARKERS  # with which a bare call begins, and what is before them
        if (bare := self._bare) is not None and not bare.may_be_list and bare.named is not None:
            self._names = Markers(bare.named.head + name for name in written_names(schemas).texts)
        self._margin = re.compile(rf"[ \t\r\n{re.escape(tools.separators if tools else '')}]+")
        self._inner: set[str] = set()  # markers that stand within calls only
        self._fresh = True  # neither content nor a call so far
        self._silent = True  # no content so far, or none since the last call
        self._announced = False  # there was a marker of calls
        self._depth = 0  # of brackets in this line of content
        self.in_reasoning = False
        self.reasoning_end: int | None = None

    def _take_markup(self, markers: set[str]) -> None:
        """From now on these are markers, also within content."""
        self._markup = tuple(sorted(markers))
        signs = ("\n",) if self._bare else ()
        if self._bare is not None and self._bare.may_be_list:
            signs = ("\n", *_OPENING, *_CLOSING)
        self._in_text = markers_of(*sorted({*markers, *signs}))

    def read(self, prompt: str, continued: str) -> Steps[None]:
        """Read to the end of the text, which continues ``prompt``."""
        source, form = self._source, self._reasoning
        if not (self._markup or self._bare or form):
            yield from source.until(markers_of(), self._out.content)
            return
        self._fresh = self._silent = not continued.strip()
        after_markup = False
        if form is not None and starts_in_reasoning(form, prompt, continued):
            self.in_reasoning = True
            yield from source.skip_space()
            yield from source.at(markers_of(*form.begins))  # models repeat the prompt's
            yield from self._read_reasoning(form)
            after_markup = True
        elif begun := next((m for m in self._markup if prompt.rstrip().endswith(m)), ""):
            source.put_before(begun)
        while True:
            lead = yield from source.run(self._margin if after_markup else SPACE)
            self._depth = 0 if "\n" in lead else self._depth
            if (yield from self._read_markup("" if after_markup else lead)):
                after_markup = True
                continue
            if not (yield from source.peek()):
                return
            yield from self._read_text()
            after_markup = False

    def _read_markup(self, lead: str) -> Steps[bool]:
        """Read a call, reasoning or another marker; False if there is content instead.

        ``lead``: whitespace before it, which is content if content follows.
        """
        opening = self._openings if self._fresh else ()
        ends = self._reasoning.ends if self._silent and self._reasoning else ()
        markers = markers_of(*self._markup, *opening, *ends)
        marker = yield from self._source.at(markers)
        if not marker and self._source.cut_off and (yield from self._breaks_off(markers)):
            return True
        call = self._calls_by_begin.get(marker)
        if not marker and (yield from self._opens_bare_call()):
            call = self._bare
        if call is not None:
            self._fresh = False
            self._silent = yield from self._read_call(call, lead)
            return self._silent
        if not marker:
            self._fresh = self._silent = False
            self._out.content(lead)
            return False
        if self._reasoning is not None and marker in self._reasoning.begins:
            yield from self._read_reasoning(self._reasoning)
        elif marker in opening:
            self._take_markup({*self._markup, *self._answer[1:]})
        elif marker not in ends:
            self._announced = True
            if marker in self._inner:
                self._out.content(lead, len(marker))
                return False
        return True

    def _read_call(self, call: CallSyntax, lead: str) -> Steps[bool]:
        """Read a call, from behind its marker; False if there is content instead."""
        assert self._calls is not None
        assert self._tools is not None
        self._announced |= bool(call.begin)
        if not call.is_loose and not self._inner:
            # From now on, markers within calls are markup as well, wherever they stand.
            self._inner = {*filter(is_tag, self._tools.markers())}.difference(self._markup)
            self._take_markup({*self._markup, *self._inner})
        is_markup = yield from self._calls.read(call, lead, announced=self._announced)
        if is_markup is not None:
            return is_markup
        if not call.is_loose:
            self._out.content(lead, len(call.begin))
            return False
        begin = call.begin or (yield from self._source.take(_OPENING))
        self._depth += begin in _OPENING
        self._out.content(lead + begin)
        return False

    def _opens_bare_call(self) -> Steps[bool]:
        """Whether a call may come next that no marker opens."""
        if self._bare is None:
            return False
        if self._bare.may_be_list:
            char = yield from self._source.peek()
            return bool(char) and char in (_OPENING if self._bare.json else "[")
        return (yield from self._source.sees(self._names))

    def _breaks_off(self, markers: Markers) -> Steps[bool]:
        """Whether the rest of the text is the beginning of a marker."""
        more = yield from self._source.peek()
        return bool(more) and (yield from self._source.breaks_off(markers))

    def _read_text(self) -> Steps[None]:
        """Read content up to the next marker, or to what may be a bare call.

        Such a call begins a line, or stands outside of any bracket: an answer in JSON is none.
        """
        source, emit = self._source, self._out.content
        if self._bare is None:
            yield from source.until(self._in_text, emit)
            return
        while (yield from source.until(self._in_text, emit)):
            if (yield from source.take("\n")):
                emit("\n")
                self._depth = 0
                if (yield from self._opens_bare_call()):
                    return
            elif closing := (yield from source.take(_CLOSING)):
                emit(closing)
                self._depth = max(0, self._depth - 1)
            elif not self._depth and (yield from self._opens_bare_call()):
                return
            elif opening := (yield from source.take(_OPENING)):
                emit(opening)
                self._depth += 1
            else:
                return

    def _read_reasoning(self, form: ReasoningFormat) -> Steps[None]:
        """Read reasoning, from behind its marker."""
        source = self._source
        self.in_reasoning = True
        yield from source.skip_space()
        ends = markers_of(*form.ends)
        tags = filter(is_tag, self._markup)
        # Space before a call is none of the reasoning.
        openings = {space + tag for tag in tags for space in ("", "\n", "\n\n")}
        found = markers_of(*form.ends, *sorted(openings), "\n" if self._bare else "")
        while (yield from source.until(found, self._out.reasoning)):
            if (yield from source.at(ends)):
                self.in_reasoning = False
                self.reasoning_end = source.consumed
                return
            if (yield from self._ends_in_calls(ends)):
                return

    def _ends_in_calls(self, ends: Markers) -> Steps[bool]:
        """Read calls within reasoning; if more text than its end follows, they are reasoning."""
        source, out = self._source, self._out
        begin = source.consumed
        source.mark()
        out.hold()
        first = whole = 0  # lengths: to the end of the first marker, and of the last call
        while True:
            yield from source.run(self._margin)
            marker = yield from source.at(markers_of(*self._markup))
            call = self._calls_by_begin.get(marker)
            if not marker and (yield from self._opens_bare_call()):
                call = self._bare
            first = first or source.consumed - begin
            if call is None and not marker:
                break
            if call is not None and self._calls is not None:
                made = out.calls
                is_markup = yield from self._calls.read(call, "", announced=False)
                if not is_markup or out.calls == made or (out.open_call and source.cut_off):
                    out.spilled = True
                    break
                whole = source.consumed - begin
        source.mark()
        yield from source.at(ends)
        yield from source.skip_space()
        at_end = not (yield from source.peek())
        source.rewind()
        if whole and at_end and not out.spilled:
            source.unmark()
            out.release(drop=False)
            yield from source.at(ends)
            self.in_reasoning = False
            self.reasoning_end = begin
            return True
        out.release(drop=True)
        out.reasoning(source.rewind(whole or first))
        return False


def starts_in_reasoning(form: ReasoningFormat, prompt: str, continued: str = "") -> bool:
    """Whether a text that follows ``prompt`` starts within reasoning.

    It does if the prompt ends with the marker (DeepSeek R1). Only the very end counts, as a user's
    message may hold any marker. ``continued``, the end of the prompt that begins the message
    itself, may open or close reasoning as well.
    """
    opened = prompt.removesuffix(continued).rstrip().endswith(form.begins)
    last_begin = max(continued.rfind(begin) for begin in form.begins)
    last_end = max(continued.rfind(end) for end in form.ends)
    return opened if last_begin == last_end else last_begin > last_end
