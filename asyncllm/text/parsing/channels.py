"""Reads messages on channels: OpenAI's harmony format, which gpt-oss writes.

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from asyncllm.text.parsing.calls.output import NotACall
from asyncllm.text.parsing.source import markers_of

if TYPE_CHECKING:
    from asyncllm.text.parsing.calls.output import CallOutput
    from asyncllm.text.parsing.formats import ChannelFormat
    from asyncllm.text.parsing.outbox import Outbox
    from asyncllm.text.parsing.source import Source, Steps

_PLAIN = re.compile(r"[^<]+")  # no marker begins in it
_MAX_HEADER = 512  # characters
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class ChannelReader:
    """Reads a whole text of messages.

    A message to a tool that was offered is a call; one on the reasoning channel is reasoning; any
    other is content. A header that does not fit, or names another tool, stays in the text.

    Attributes:
        in_reasoning: whether the text now being read is reasoning.
        reasoning_end: how many characters come before the end of the first message of reasoning,
            once it is there.
    """

    def __init__(self, source: Source, out: Outbox, calls: CallOutput, form: ChannelFormat):
        self._source = source
        self._out = out
        self._calls = calls
        self._form = form
        self._openers = markers_of(form.start, form.channel)
        self._ends = markers_of(*form.ends)
        self._stops = markers_of(*form.ends, form.start, form.channel)
        self._in_header = markers_of(form.channel, form.constrain, form.message)
        self._channel = re.compile(re.escape(form.channel) + r"\s*(\w+)")
        self.in_reasoning = False
        self.reasoning_end: int | None = None

    def read(self, prompt: str, continued: str = "") -> Steps[None]:
        """Read to the end of the text, which continues ``prompt``."""
        source = self._source
        begun = self._begun(prompt)
        if begun.endswith(self._form.message):
            yield from self._body(begun)
        elif begun:
            yield from self._continue_header(begun)
        while (yield from source.until(self._stops, self._out.content)):
            if (yield from source.at(self._ends)):
                continue
            source.keep()
            opener = yield from source.at(self._openers)
            yield from self._message(opener)

    def _begun(self, prompt: str) -> str:
        """The unfinished header at the end of the prompt; "" if no message has begun."""
        form = self._form
        _, start, tail = prompt.rpartition(form.start)
        if not start or any(end in tail for end in form.ends):
            return ""
        header, message, _ = tail.partition(form.message)
        return header + message

    def _continue_header(self, begun: str) -> Steps[None]:
        """Read the rest of a header; after a role alone there may be content instead."""
        form, source = self._form, self._source
        source.keep()
        if form.channel in begun:
            yield from self._message(begun)
            return
        following = markers_of(form.channel, form.constrain, form.message, " to=")
        if marker := (yield from source.at(following)):
            yield from self._message(begun + marker, begins_body=marker == form.message)
        else:
            source.give_back()  # nothing: content follows

    def _message(self, header: str, *, begins_body: bool = False) -> Steps[None]:
        """Read the rest of a header, and the body."""
        source = self._source
        while not begins_body:
            header += yield from source.run(_PLAIN, max(0, _MAX_HEADER - len(header)))
            marker = yield from source.at(self._in_header)
            if not marker and self._source.cut_off:
                source.drop()
                return
            if not marker or len(header) >= _MAX_HEADER:
                self._out.content(source.give_back())
                return
            header += marker
            begins_body = marker == self._form.message
        yield from self._body(header)

    def _body(self, header: str) -> Steps[None]:
        source = self._source
        channel = self._channel.search(header)
        self.in_reasoning = channel is not None and channel[1] == self._form.reasoning_channel
        emit = self._out.reasoning if self.in_reasoning else self._out.content
        try:
            if (recipient := _RECIPIENT.search(header)) is None:
                source.give_back()
            else:
                yield from self._call(recipient[1])
        except NotACall:
            if source.cut_off:
                source.drop()
            emit(source.give_back())
        if (yield from source.until(self._stops, emit)):
            reasoned, self.in_reasoning = self.in_reasoning, False
            yield from source.at(self._ends)
            if reasoned and self.reasoning_end is None:
                self.reasoning_end = source.consumed
            yield from source.skip_space()

    def _call(self, recipient: str) -> Steps[None]:
        """Read the arguments of a call, which end with the message."""
        name = self._calls.offered(recipient, self._form.namespace)
        yield from self._source.skip_space()
        if (yield from self._source.at(self._ends)):
            self._calls.without_arguments(name)
            return
        yield from self._calls.expect_value()
        yield from self._calls.arguments(self._calls.start(name), self._stops)
        yield from self._source.skip_space()
