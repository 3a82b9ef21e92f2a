"""Events of a text while it comes, what collects them, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from asyncllm.text.parsing.source import Emit, Source
from asyncllm.types import FinishReason

#: Makes the id of a call from its index in the message and its tool's name.
NewId: TypeAlias = Callable[[int, str], str]


class Content(msgspec.Struct, frozen=True, gc=False, tag="content"):
    """More of the answer that the user reads."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False, tag="reasoning"):
    """More of the model's reasoning."""

    text: str


class ToolStart(msgspec.Struct, frozen=True, gc=False, tag="tool_start"):
    """A call begins: number ``index`` (from 0) of the message, of the tool ``name``."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, gc=False, tag="tool_arguments"):
    """More of the arguments of call ``index``; all of them, joined, are a JSON object."""

    index: int
    text: str


class End(msgspec.Struct, frozen=True, gc=False, tag="end"):
    """The text has ended; always the last event.

    Attributes:
        calls: how many calls began.
        open_call: the text ended within the arguments of the last call: they had to be closed.
        open_reasoning: the text ended within the reasoning.
    """

    calls: int
    open_call: bool
    open_reasoning: bool


Event: TypeAlias = Content | Reasoning | ToolStart | ToolArguments | End


class ToolCall(msgspec.Struct):
    """One whole call; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct):
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[ToolCall]


def message_of(events: Iterable[Event]) -> Message:
    """The message that a text's events add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolStart] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolStart():
                starts.append(event)
                arguments.append([])
            case ToolArguments(index, text):
                arguments[index].append(text)
    calls = [
        ToolCall(start.id, start.name, "".join(pieces))
        for start, pieces in zip(starts, arguments, strict=True)
    ]
    return Message("".join(content), "".join(reasoning), calls)


def finish_reason(
    reason: FinishReason, calls: int, *, breaks_off: bool = False
) -> Literal["stop", "length", "tool_calls", "abort"]:
    """OpenAI's finish_reason of a message with this number of calls.

    "tool_calls" if there is a call and the model ended by itself. A text that was cut off has
    "length", with calls or without: the last call may not be whole. For the same reason it is
    "stop" if a stop string ``breaks_off`` the arguments of a call.
    """
    made = calls and reason is FinishReason.STOP and not breaks_off
    return "tool_calls" if made else reason.value


@dataclass(slots=True, eq=False)
class Outbox:
    """Takes events from the readers.

    Attributes:
        calls: how many calls have begun.
        open_call: the last of them has not ended.
        places: start and end, in the text, of each piece of content; None: not recorded.
        spilled: there was content since ``hold``. It is not kept.
    """

    _new_id: NewId
    _source: Source
    calls: int = 0
    open_call: bool = False
    places: list[tuple[int, int]] | None = None
    spilled: bool = False
    _events: list[Event] = field(default_factory=list)
    _held: tuple[int, int] | None = None  # events before ``hold``, and calls
    _kind: Callable[[str], Event] | None = None  # of the pieces
    _pieces: list[str] = field(default_factory=list)

    def content(self, text: str, after: int = 0) -> None:
        """Add content: the text consumed last, except for ``after`` characters behind it."""
        if self._held is not None:
            self.spilled = True
            return
        end = self._source.consumed - after
        text = text[-end:] if 0 < end < len(text) else text if end > 0 else ""
        if self.places is not None and text:
            self.places.append((end - len(text), end))
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def start_call(self, name: str) -> Emit:
        """Begin the next call; returns what takes its arguments."""
        index = self.calls
        self._join()
        self._events.append(ToolStart(index, self._new_id(index, name), name))
        self.calls += 1
        self.open_call = True

        def arguments(text: str) -> Event:
            return ToolArguments(index, text)

        return lambda text: self._add(arguments, text)

    def end_call(self) -> None:
        self.open_call = False

    def end(self, *, open_reasoning: bool) -> None:
        self._join()
        self._events.append(End(self.calls, self.open_call, open_reasoning))

    def hold(self) -> None:
        """Keep the events from here on until ``release``, which may drop them."""
        self._join()
        self._held = len(self._events), self.calls
        self.spilled = False

    def release(self, *, drop: bool) -> None:
        """End ``hold``, before which no call was open and after which came nothing but calls."""
        assert self._held is not None
        if drop:
            self._pieces.clear()
            del self._events[self._held[0] :]
            self.calls, self.open_call = self._held[1], False
        self._held = None

    def drain(self) -> list[Event]:
        """The events since the last time."""
        self._join()
        if self._held is not None:
            events = self._events[: self._held[0]]
            del self._events[: self._held[0]]
            self._held = 0, self._held[1]
            return events
        events, self._events = self._events, []
        return events

    def _add(self, kind: Callable[[str], Event], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._join()
            self._kind = kind
        self._pieces.append(text)

    def _join(self) -> None:
        if self._pieces and self._kind is not None:
            self._events.append(self._kind("".join(self._pieces)))
            self._pieces = []
