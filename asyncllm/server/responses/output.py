"""The items of a response's output while they grow, and the events about them."""

from __future__ import annotations

from functools import partial
from typing import Any

from asyncllm.server.openai.schemas import TokenLogprob
from asyncllm.server.responses import item_schemas as items
from asyncllm.server.responses import schemas
from asyncllm.server.responses.tools import Offers
from asyncllm.server.streaming.frames import named_event
from asyncllm.text.parsing import Content, Event, Reasoning, ToolArguments, ToolStart


class EventWriter:
    """Numbers and encodes the events of one response; writes nothing if it is not ``active``."""

    def __init__(self, *, active: bool):
        self._active = active
        self._written = 0

    def write(self, kind: type[schemas.NumberedEvent], **fields: Any) -> bytes:
        if not self._active:
            return b""
        event = kind(sequence_number=self._written, **fields)
        self._written += 1
        return named_event(event)


class OpenItem:
    """An item while it grows.

    Attributes:
        item: has neither text nor arguments until it is closed.
    """

    def __init__(self, item: items.OutputItem, index: int, events: EventWriter):
        self.item = item
        self._place: dict[str, Any] = {"output_index": index}
        self._write = events.write
        self._texts: list[str] = []

    def takes(self, event: Event) -> bool:
        """Whether an event goes on with this item."""
        raise NotImplementedError

    def open(self) -> bytes:
        return self._write(schemas.OutputItemAdded, **self._place, item=self.item)

    def add(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        raise NotImplementedError

    def close(self, status: items.ItemStatus) -> bytes:
        return self._write(schemas.OutputItemDone, **self._place, item=self.item)


class TextItem(OpenItem):
    """A message, or the reasoning: one part with all of its text."""

    item: items.MessageItem | items.ReasoningItem

    def __init__(self, *parts: Any, seals: bool = False):
        """``seals``: whether reasoning is also in a form for clients that keep it."""
        super().__init__(*parts)
        self._reasoning = isinstance(self.item, items.ReasoningItem)
        self._seals = seals
        self._part_place = {**self._place, "item_id": self.item.id, "content_index": 0}
        self._logprobs: list[TokenLogprob] = []

    def takes(self, event: Event) -> bool:
        return isinstance(event, Reasoning if self._reasoning else Content)

    def open(self) -> bytes:
        part = self._part("")
        return super().open() + self._write(schemas.ContentPartAdded, **self._part_place, part=part)

    def add(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        self._texts.append(text)
        self._logprobs += logprobs
        if self._reasoning:
            return self._write(schemas.ReasoningDelta, **self._part_place, delta=text)
        return self._write(schemas.TextDelta, **self._part_place, delta=text, logprobs=logprobs)

    def close(self, status: items.ItemStatus) -> bytes:
        text = "".join(self._texts)
        part = self._part(text)
        self.item.status, self.item.content = status, [part]
        place = self._part_place
        if isinstance(self.item, items.ReasoningItem):
            done = self._write(schemas.ReasoningDone, **place, text=text)
            if self._seals:
                self.item.encrypted_content = items.seal(text)
        else:
            done = self._write(schemas.TextDone, **place, text=text, logprobs=self._logprobs)
        done += self._write(schemas.ContentPartDone, **place, part=part)
        return done + super().close(status)

    def _part(self, text: str) -> Any:
        if self._reasoning:
            return items.ReasoningText(text)
        return items.OutputText(text=text, annotations=[], logprobs=self._logprobs)


class CallItem(OpenItem):
    """A call of a tool."""

    def __init__(self, start: ToolStart, id: str, index: int, events: EventWriter, offers: Offers):
        self._start = start
        self._make = partial(offers.item, start.name, call_id=start.id, id=id)
        super().__init__(self._make("", status="in_progress"), index, events)

    def takes(self, event: Event) -> bool:
        return isinstance(event, ToolArguments) and event.index == self._start.index

    def add(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        self._texts.append(text)
        if not isinstance(self.item, items.FunctionCallItem):
            return b""  # only its whole arguments say what the call is
        return self._write(schemas.ArgumentsDelta, **self._place, item_id=self.item.id, delta=text)

    def close(self, status: items.ItemStatus) -> bytes:
        self.item = item = self._make("".join(self._texts), status=status)
        place = {**self._place, "item_id": item.id}
        done = b""
        match item:
            case items.FunctionCallItem(name=name, arguments=arguments):
                done = self._write(schemas.ArgumentsDone, **place, name=name, arguments=arguments)
            case items.CustomToolCallItem():
                done = self._write(schemas.CustomInputDelta, **place, delta=item.input)
                done += self._write(schemas.CustomInputDone, **place, input=item.input)
        return done + super().close(status)


def open_item(
    event: Event, response_id: str, index: int, events: EventWriter, offers: Offers, *, seals: bool
) -> OpenItem:
    """The item that an event begins; its id is as unique as the response's."""
    unique = item_id("", response_id, index)
    head: dict[str, Any] = {"status": "in_progress", "content": []}
    match event:
        case ToolStart():
            return CallItem(event, f"fc_{unique}", index, events, offers)
        case Reasoning():
            thought = items.ReasoningItem(id=f"rs_{unique}", summary=[], **head)
            return TextItem(thought, index, events, seals=seals)
    message = items.MessageItem(id=f"msg_{unique}", role="assistant", **head)
    return TextItem(message, index, events)


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of one item of a response."""
    return f"{prefix}{response_id.removeprefix('resp_')}{index:04x}"
