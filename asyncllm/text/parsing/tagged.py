"""Reads texts in which tags mark reasoning and calls, and the rest is content."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from asyncllm.text.parsing.source import SPACE, markers_of

if TYPE_CHECKING:
    from asyncllm.text.parsing.calls.reader import CallReader
    from asyncllm.text.parsing.formats import CallSyntax, ReasoningFormat, ToolFormat
    from asyncllm.text.parsing.outbox import Outbox
    from asyncllm.text.parsing.source import Markers, Source, Steps

_BRACKETS = ("{", "[")


class TaggedReader:
    """Reads a whole text.

    Reasoning comes first or not at all: after content or a call, its marker and that of the answer
    are text. Within reasoning only its end is markup. Whitespace after markup belongs to the
    markup, and so does whitespace at the very beginning if markup follows.

    Attributes:
        in_reasoning: whether the text now being read is reasoning.
        reasoning_end: characters up to the end of the reasoning, once it is there.
    """

    def __init__(
        self,
        source: Source,
        out: Outbox,
        calls: CallReader,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
    ):
        self._source = source
        self._out = out
        self._calls = calls
        self._reasoning = reasoning
        self._answer = (reasoning.answer if reasoning else None) or ("", "")
        self._openings = (*reasoning.begins, self._answer[0]) if reasoning else ()
        self._calls_by_begin = {call.begin: call for call in tools.calls} if tools else {}
        self._bare = self._calls_by_begin.pop("", None)
        self._markup = (*self._calls_by_begin, *(tools.ignored if tools else ()))
        self._margin = re.compile(rf"[ \t\r\n{re.escape(tools.separators if tools else '')}]+")
        self._fresh = True  # neither content nor a call so far
        self._announced = False  # there was a marker of calls
        self.in_reasoning = False
        self.reasoning_end: int | None = None

    def read(self, prompt: str, continued: str) -> Steps[None]:
        """Read to the end of the text, which continues ``prompt``."""
        source, form = self._source, self._reasoning
        if not (self._markup or self._bare or form):
            yield from source.until(markers_of(), self._out.content)
            return
        self._fresh = not continued.strip()
        after_markup = False
        if form is not None and starts_in_reasoning(form, prompt, continued):
            self.in_reasoning = True
            yield from source.skip_space()
            yield from source.at(markers_of(*form.begins))  # models repeat the prompt's
            yield from self._read_reasoning(form)
            after_markup = True
        while True:
            lead = yield from source.run(self._margin if after_markup else SPACE)
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
        markers = markers_of(*self._markup, *opening)
        marker = yield from self._source.at(markers)
        if not marker and self._source.cut_off and (yield from self._breaks_off(markers)):
            return True
        call = self._calls_by_begin.get(marker)
        if not marker and self._bare and (yield from self._source.peek()) in _BRACKETS:
            call = self._bare
        if call is not None:
            self._fresh = False
            self._announced |= bool(call.begin)
            announced = self._announced
            return (yield from self._calls.read(call, self._stops(call), lead, announced=announced))
        if not marker:
            self._fresh = False
            self._out.content(lead)
            return False
        if self._reasoning is not None and marker in self._reasoning.begins:
            yield from self._read_reasoning(self._reasoning)
        elif marker == self._answer[0] and self._answer[1] not in self._markup:
            self._markup = (*self._markup, self._answer[1])
        else:
            self._announced = True
        return True

    def _breaks_off(self, markers: Markers) -> Steps[bool]:
        """Whether the rest of the text is the beginning of a marker."""
        more = yield from self._source.peek()
        return bool(more) and (yield from self._source.breaks_off(markers))

    def _read_text(self) -> Steps[None]:
        """Read content up to the next marker, or a line that may begin a bare call."""
        source = self._source
        if self._bare is None:
            yield from source.until(markers_of(*self._markup), self._out.content)
            return
        markers = markers_of(*self._markup, "\n")
        while (yield from source.until(markers, self._out.content)):
            if not (yield from source.take("\n")):
                return
            self._out.content("\n")
            if (yield from source.peek()) in _BRACKETS:
                return

    def _read_reasoning(self, form: ReasoningFormat) -> Steps[None]:
        """Read reasoning, from behind its marker."""
        source = self._source
        self.in_reasoning = True
        yield from source.skip_space()
        ends = markers_of(*form.ends)
        if not (yield from source.until(ends, self._out.reasoning)):
            return
        yield from source.at(ends)
        self.in_reasoning = False
        self.reasoning_end = source.consumed

    def _stops(self, call: CallSyntax) -> Markers:
        """The markers that end arguments which are not JSON: the call's end, or the next call."""
        return markers_of(*(call.end or self._calls_by_begin))


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
