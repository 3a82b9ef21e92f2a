"""Reads messages on channels: OpenAI's harmony format, which gpt-oss writes.

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncllm.text.parsing.calls.arguments import NotACall, offered, read_arguments
from asyncllm.text.parsing.events import Outbox
from asyncllm.text.parsing.formats import ChannelFormat
from asyncllm.text.parsing.source import Emit, Source, Steps, markers_of

_PLAIN = re.compile(r"[^<{]+")  # neither a marker nor an object begins in it
_MAX_HEADER = 512  # characters
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class ChannelReader:
    """Reads a whole text of messages.

    A message to a tool that was offered is a call; one on the reasoning channel is reasoning; any
    other is content, also one to a tool that was not offered. Headers and markers are left out.

    Attributes:
        in_reasoning: whether the text now being read is reasoning.
        reasoning_end: how many characters come before the end of the first message of reasoning,
            once it is there.
    """

    def __init__(self, source: Source, out: Outbox, tools: Mapping[str, Any], form: ChannelFormat):
        self._source = source
        self._out = out
        self._tools = tools
        self._form = form
        self._markers = markers_of(*form.markers())
        self._ends = markers_of(*form.ends)
        self._openers = markers_of(form.start, form.channel)
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
        while (yield from source.until(self._markers, self._out.content)):
            if opener := (yield from source.at(self._openers)):
                yield from self._message(opener)
            else:
                yield from source.at(self._markers)

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
        if form.channel in begun:
            yield from self._message(begun)
            return
        following = markers_of(form.channel, form.constrain, form.message, " to=")
        if marker := (yield from source.at(following)):
            yield from self._message(begun + marker, begins_body=marker == form.message)

    def _message(self, header: str, *, begins_body: bool = False) -> Steps[None]:
        """Read the rest of a header, and the body."""
        source = self._source
        while not begins_body:
            rest = yield from source.run(_PLAIN, max(0, _MAX_HEADER - len(header)))
            header += rest
            if (yield from source.peek()) == "{":
                break  # the marker before the body is missing
            marker = yield from source.at(self._in_header)
            if not marker and len(header) >= _MAX_HEADER:
                self._out.content(rest)  # no header
                return
            if not marker:
                return  # the next message, or the end
            header += marker
            begins_body = marker == self._form.message
        yield from self._body(header)

    def _body(self, header: str) -> Steps[None]:
        source = self._source
        channels = self._channel.findall(header)  # of several the last one counts
        self.in_reasoning = channels[-1:] == [self._form.reasoning_channel]
        emit = self._out.reasoning if self.in_reasoning else self._out.content
        if (recipient := _RECIPIENT.search(header)) and (
            name := offered(recipient[1], self._tools)
        ):
            source.mark()
            try:
                yield from self._call(name)
            except NotACall:
                if source.cut_off:
                    source.unmark()
                    source.drop()
                else:
                    source.rewind()
        while (yield from source.until(self._markers, emit)):
            if not (yield from source.sees(self._stops)):
                yield from source.at(self._markers)  # one that belongs to a header
                continue
            reasoned, self.in_reasoning = self.in_reasoning, False
            yield from source.at(self._ends)
            if reasoned and self.reasoning_end is None:
                self.reasoning_end = source.consumed
            yield from source.skip_space()
            return

    def _call(self, name: str) -> Steps[None]:
        """Read the arguments of a call, which end with the message."""
        source = self._source

        def start() -> Emit:
            source.unmark()
            return self._out.start_call(name)

        yield from source.skip_space()
        char = yield from source.peek()
        if (char or not source.cut_off) and (not char or (yield from source.sees(self._stops))):
            start()("{}")
            whole = True
        else:
            whole = yield from read_arguments(source, start, stops=self._stops)
        if whole or (yield from source.peek()):
            self._out.end_call()
        yield from source.skip_space()
