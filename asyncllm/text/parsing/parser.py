"""The incremental parser: generated text in, events out.

``ChannelReader`` reads OpenAI's harmony format (https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.text.parsing.calls.arguments import NotACall, offered, read_arguments
from asyncllm.text.parsing.events import Content, Event, NewId, Outbox, Reasoning
from asyncllm.text.parsing.formats import CallIds, ChannelFormat, Formats
from asyncllm.text.parsing.source import Emit, Source, Steps, markers_of
from asyncllm.text.parsing.tagged import TaggedReader

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


_ALPHANUMERIC = string.ascii_letters + string.digits
_NEW_ID: dict[CallIds, NewId] = {
    "random": lambda index, name: f"call_{secrets.token_hex(12)}",
    "short": lambda index, name: "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9)),
    "named": lambda index, name: f"functions.{name}:{index}",
}


class Parser:
    """Splits one generated text into content, reasoning and tool calls while it comes.

    However the text is cut into pieces, the events add up to the same message. Text is held back
    only while it may begin markup; if it does not, it is content, exactly as it was generated.
    Time and memory are linear in the text.
    """

    def __init__(
        self,
        formats: Formats,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt: str = "",
        continued: str = "",
        new_id: NewId | None = None,
    ):
        """Start a text.

        Args:
            formats: how the model writes.
            tools: OpenAI's definitions of the tools that may be called; without any, markup of
                calls is content.
            prompt: the rendered prompt, or its last few hundred characters: if it ends within
                reasoning, the text starts with reasoning.
            continued: the end of the prompt that begins the message itself
                (continue_final_message).
            new_id: makes the ids of calls, by default in the form of the format.
        """
        if new_id is None:
            new_id = _NEW_ID[formats.tools.call_ids if formats.tools else "random"]
        self._source = Source()
        self._out = Outbox(new_id, self._source)
        schemas = parameter_schemas(tools)
        reader: ChannelReader | TaggedReader
        if formats.channels is not None:
            reader = ChannelReader(self._source, self._out, schemas, formats.channels)
        else:
            assert not isinstance(formats.tools, ChannelFormat)
            assert not isinstance(formats.reasoning, ChannelFormat)
            reader = TaggedReader(
                self._source,
                self._out,
                formats.tools if tools else None,
                schemas,
                formats.reasoning,
            )
        self._reader = reader
        # The kinds of event that a text alone makes, by where a reader emits it.
        self._kinds: dict[Emit, type[Content | Reasoning]] = {
            self._out.content: Content,
            self._out.reasoning: Reasoning,
        }
        # The generator refers to the reader, not to the parser: no cycle, freed at once.
        self._steps = reader.read(prompt, continued)
        next(self._steps, None)

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._reader.in_reasoning

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return self._out.calls

    @property
    def reasoning_end(self) -> int | None:
        """How many characters of the text come before the answer, once reasoning has ended."""
        return self._reader.reasoning_end

    def record_places(self) -> None:
        """Record places for ``take_places``; called before the first text."""
        self._out.places = []

    def take_places(self) -> list[tuple[int, int]]:
        """Start and end, in the text, of each piece of content since the last call.

        The joined pieces are the joined texts of the ``Content`` events.
        """
        places, self._out.places = self._out.places, []
        return places or []

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""
        return self._out.open_call

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text; return the events that have become certain."""
        if not text:
            return []
        waiting = self._source.waiting
        if waiting is not None and waiting[0].isdisjoint(text):
            kind = self._kinds.get(waiting[1])
            if kind is not None:  # text without markup, which is most of it: two calls a token
                self._source.pass_by(len(text))
                if kind is Content and self._out.places is not None:
                    end = self._source.consumed
                    self._out.places.append((end - len(text), end))
                return [kind(text)]
        self._source.feed(text)
        next(self._steps, None)
        return self._out.drain()

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        """The text has ended: return the events held back, and the end. Called once, last.

        Args:
            cut_off: the model did not end the text. Then unfinished markup at its end is dropped;
                otherwise it is content.
        """
        self._source.end(cut_off=cut_off)
        for _ in self._steps:
            pass
        self._out.end(open_reasoning=self._reader.in_reasoning)
        return self._out.drain()


def parameter_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of each tool's parameters by the tool's name; ``tools`` are OpenAI's definitions.

    A function without a schema takes no parameters.
    """
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
    return {function["name"]: function.get("parameters") or nothing for function in functions}
