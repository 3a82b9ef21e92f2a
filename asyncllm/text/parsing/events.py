"""Events of a text while it comes, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from asyncllm.types import FinishReason


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
