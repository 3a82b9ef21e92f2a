"""How a model writes reasoning and tool calls, as data (``registry`` holds the known formats).

Markers are literal text. Whitespace is allowed between all markup and is not written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Literal, TypeAlias

import msgspec

CallIds: TypeAlias = Literal["random", "short", "named"]

_TAG = re.compile(r"<\||[<>\[\]|]\W*\w|\w\W*[<>\[\]|]")


def is_tag(marker: str) -> bool:
    """Whether a text can only be markup, such as ``<tool_call>``: other markers are also prose."""
    return _TAG.search(marker) is not None


class JsonBody(msgspec.Struct, frozen=True):
    """A call as one JSON object that holds the name and the arguments; or a list of such objects.

    Attributes:
        name_keys: one of these keys holds the name, or an object with the name and the arguments,
            as in OpenAI's ``{"function": {"name": ...}}``.
        argument_keys: one of these keys holds the arguments: an object, or its text as a string.
        other_keys: further keys that a call may have; None for any.
        needs_arguments: an object with a name alone is an answer, not a call.
        keyed: the name may also be the key of the arguments.
    """

    name_keys: tuple[str, ...] = ("name", "function")
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    other_keys: tuple[str, ...] | None = None
    needs_arguments: bool = False
    keyed: bool = False


class ParameterStyle(msgspec.Struct, frozen=True):
    """Arguments written one by one as text; only the tool's schema tells the type of a value.

    Attributes:
        key_begin, key_end, value_begin, value_end: markers around a name, which may be in quotes,
            and its value; the last may have the name in it, where {} stands.
        own_lines: a value stands on lines of its own: one line break on each side is markup.
        kind_end: after ``key_end`` come a word for the kind of the value, which may be in quotes,
            and this marker.
        text_kind: the word that says that the value is a string.
    """

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    own_lines: bool
    kind_end: str = ""
    text_kind: str = ""


class NamedBody(msgspec.Struct, frozen=True):
    """A call as ``head NAME name_end ARGUMENTS``; ``name_end`` may be missing before a bracket.

    The name may be in quotes. The arguments are an object, or are written as ``parameters`` says.

    Attributes:
        head: the marker before the name; an id or a number of the call may come before it.
        call_id: a marker that may follow the name, with an id or a number behind it.
        name_end: the marker between the name and the arguments.
        end: markers that close the body, before those that close the call.
        parameters: how arguments are written that are not an object.
        in_python: the arguments are those of a call in Python, ``NAME(key=value)``; calls follow
            one another, with a comma between them or on lines of their own.
        quote: a mark around strings, instead of quotes.
        answer: in place of a name, it says that content follows.
    """

    name_end: str = ""
    head: str = ""
    call_id: str = ""
    end: tuple[str, ...] = ()
    parameters: ParameterStyle | None = None
    in_python: bool = False
    quote: str = ""
    answer: str = ""


class CallSyntax(msgspec.Struct, frozen=True):
    """One way to write a call: ``begin``, a body or a list of bodies in brackets, ``end``.

    Attributes:
        begin: the marker that opens the call. "" for a bare call: an object or a list, or a name at
            the beginning of a line.
        json: the body if an object follows; None if there is no such form.
        named: the body if anything else follows.
        end: markers that close the call, one after the other; any of them may be missing.
    """

    begin: str
    json: JsonBody | None = None
    named: NamedBody | None = None
    end: tuple[str, ...] = ()

    @property
    def closing(self) -> tuple[str, ...]:
        """The markers that close a body and the call."""
        return (*(self.named.end if self.named else ()), *self.end)

    @property
    def is_loose(self) -> bool:
        """Whether the beginning of a call may also begin an answer."""
        return not is_tag(self.begin)

    @property
    def may_be_list(self) -> bool:
        """Whether bodies may stand in brackets."""
        return self.json is not None or (self.named is not None and self.named.in_python)


class CallTemplate(msgspec.Struct, frozen=True):
    """How a grammar has calls written.

    A text is ``begin``, then calls with ``separator`` between them, then ``end``. A call is
    ``before_name``, its name, ``after_name``, the arguments as JSON, ``after_arguments``.
    """

    before_name: str
    after_name: str
    after_arguments: str
    begin: str = ""
    separator: str = ""
    end: str = ""


class ToolFormat(msgspec.Struct, frozen=True):
    """How a family of models writes tool calls.

    Attributes:
        name: what ``--tool-parser`` calls it.
        calls: the ways to write a call; no ``begin`` is the beginning of another.
        template: the way that a grammar forces; it reads back as the same calls.
        ignored: markers around calls that mean nothing by themselves.
        separators: characters that may stand between calls, in addition to whitespace.
        call_ids: the ids that the chat template takes: "random" like OpenAI's; "short", nine
            letters and digits; "named" with the name and the number of the call.
    """

    name: str
    calls: tuple[CallSyntax, ...]
    template: CallTemplate
    ignored: tuple[str, ...] = ()
    separators: str = ""
    call_ids: CallIds = "random"

    def outer_markers(self) -> Iterator[str]:
        """The markers around calls that are tags, and all that end one."""
        yield from filter(is_tag, self.ignored)
        for call in self.calls:
            if not call.is_loose:
                yield call.begin
            yield from call.end

    def without_markup(self, text: str) -> Iterator[tuple[int, str]]:
        """What is left of a call's text without its markup: pieces, each with its start."""
        spans, start = list[tuple[int, int]](), 0
        for found in _markup_of(self).finditer(text):
            spans.append((start, found.start()))
            if group := found.lastindex:
                spans.append(found.span(group))
            start = found.end()
        spans.append((start, len(text)))
        shown = [number for number, (start, end) in enumerate(spans) if text[start:end].strip()]
        spans = spans[shown[0] : shown[-1] + 1] if shown else []
        for number, (start, end) in enumerate(spans):
            if number == 0:
                start = end - len(text[start:end].lstrip())
            if number == len(spans) - 1:
                end = start + len(text[start:end].rstrip())
            yield start, text[start:end]

    def markers(self) -> Iterator[str]:
        """Every marker of the format."""
        yield from self.ignored
        for call in self.calls:
            yield from (call.begin, *call.end)
            if call.named is not None:
                yield from (call.named.head, call.named.call_id, call.named.name_end)
                yield from (call.named.quote, *call.named.end)
                if (style := call.named.parameters) is not None:
                    yield from (style.key_begin, style.key_end, style.kind_end)
                    yield from (style.value_begin, style.value_end)


@cache
def _markup_of(form: ToolFormat) -> re.Pattern[str]:
    """All that is markup within a call; a name between two markers is a group."""
    patterns = list[str]()
    for call in form.calls:
        if (body := call.named) is not None:
            if body.head:
                patterns.append(_between(body.head, body.name_end))
            if (style := body.parameters) is not None:
                patterns.append(_between(style.key_begin, style.key_end))
    tags = sorted({marker for marker in form.markers() if is_tag(marker)}, key=len, reverse=True)
    patterns += (re.escape(tag).replace(r"\{\}", r"[\w.-]+") for tag in tags)
    return re.compile("|".join(patterns) or "(?!)")


def _between(before: str, after: str) -> str:
    return rf"{re.escape(before)}[\"']?([\w.:/ -]*)[\"']?{re.escape(after)}"


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a family of models marks its reasoning, which comes before everything else.

    Attributes:
        name: what ``--reasoning-parser`` calls it.
        begins, ends: the markers around it; any of several.
        answer: markers around the answer that follows, for models that write them: one before it,
            and those behind it.
    """

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    answer: tuple[str, ...] = ()

    def markers(self) -> Iterator[str]:
        """Every marker of the format."""
        yield from (*self.begins, *self.ends, *self.answer)


class ChannelFormat(msgspec.Struct, frozen=True):
    """Messages on named channels, which hold reasoning, calls or content (OpenAI's harmony).

    A message is ``start ROLE channel CHANNEL constrain TYPE message TEXT`` and one of ``ends``. A
    recipient `` to=NAME``, written after the role or after the channel, makes it a call.
    """

    name: str
    start: str
    channel: str
    constrain: str
    message: str
    ends: tuple[str, ...]
    reasoning_channel: str
    template: CallTemplate
    call_ids: CallIds = "random"

    def markers(self) -> Iterator[str]:
        """Every marker of the format."""
        yield from (self.start, self.channel, self.constrain, self.message, *self.ends)


class Formats(msgspec.Struct, frozen=True):
    """How one model writes; None for no calls, or no reasoning: such markup is content then.

    Raises:
        ValueError: a channel format, which holds calls and reasoning, is combined with another.
    """

    tools: ToolFormat | ChannelFormat | None = None
    reasoning: ReasoningFormat | ChannelFormat | None = None

    def __post_init__(self) -> None:
        channels = [f for f in (self.tools, self.reasoning) if isinstance(f, ChannelFormat)]
        if channels and self.tools != self.reasoning:
            raise ValueError(
                f"format {channels[0].name!r} is for tools and reasoning together, "
                "it cannot be combined with another"
            )

    @property
    def channels(self) -> ChannelFormat | None:
        """The channel format; None for any other."""
        return self.tools if isinstance(self.tools, ChannelFormat) else None

    def markers(self) -> frozenset[str]:
        """Every marker of either format."""
        found: set[str] = set()
        for format_ in (self.tools, self.reasoning):
            if format_ is not None:
                found.update(format_.markers())
        return frozenset(found - {""})
