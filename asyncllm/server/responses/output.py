"""The items of a response's output while they grow, and the events about them."""

from __future__ import annotations

from typing import Any

from asyncllm.server.openai.schemas import TokenLogprob
from asyncllm.server.responses import item_schemas, schemas
from asyncllm.server.responses.item_schemas import seal
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


class TextItem:
    """A message, or the reasoning: one part with all of its text.

    Attributes:
        item: has no part until it is closed.
    """

    def __init__(
        self,
        item: item_schemas.MessageItem | item_schemas.ReasoningItem,
        index: int,
        events: EventWriter,
        *,
        seals: bool,
    ):
        """
        Args:
            seals: whether reasoning is also in a form for clients that keep it.
        """
        self.item = item
        self._reasoning = isinstance(item, item_schemas.ReasoningItem)
        self._seals = seals
        self._index = index
        self._where = {"output_index": index, "item_id": item.id, "content_index": 0}
        self._write = events.write
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def takes(self, event: Event) -> bool:
        """Whether an event goes on with this item."""
        return isinstance(event, Reasoning if self._reasoning else Content)

    def open(self) -> bytes:
        added = self._write(schemas.OutputItemAdded, output_index=self._index, item=self.item)
        return added + self._write(schemas.ContentPartAdded, **self._where, part=self._part(""))

    def add(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        self._texts.append(text)
        self._logprobs += logprobs
        if self._reasoning:
            return self._write(schemas.ReasoningDelta, **self._where, delta=text)
        return self._write(schemas.TextDelta, **self._where, delta=text, logprobs=logprobs)

    def close(self, status: item_schemas.ItemStatus) -> bytes:
        text = "".join(self._texts)
        part = self._part(text)
        self.item.status, self.item.content = status, [part]
        if self._seals and isinstance(self.item, item_schemas.ReasoningItem):
            self.item.encrypted_content = seal(text)
        if self._reasoning:
            done = self._write(schemas.ReasoningDone, **self._where, text=text)
        else:
            fields = {"text": text, "logprobs": self._logprobs}
            done = self._write(schemas.TextDone, **self._where, **fields)
        done += self._write(schemas.ContentPartDone, **self._where, part=part)
        return done + self._write(schemas.OutputItemDone, output_index=self._index, item=self.item)

    def _part(self, text: str) -> Any:
        if self._reasoning:
            return item_schemas.ReasoningText(text)
        return item_schemas.OutputText(text=text, annotations=[], logprobs=self._logprobs)


class CallItem:
    """A call of a tool.

    Attributes:
        item: has no arguments until it is closed.
    """

    def __init__(
        self,
        start: ToolStart,
        head: dict[str, Any],
        index: int,
        events: EventWriter,
        offers: Offers,
    ):
        self._start = start
        self._head = head
        self._offers = offers
        self._index = index
        self._write = events.write
        self._texts: list[str] = []
        self.item = self._made("in_progress")

    def takes(self, event: Event) -> bool:
        """Whether an event goes on with this item."""
        return isinstance(event, ToolArguments) and event.index == self._start.index

    def open(self) -> bytes:
        return self._write(schemas.OutputItemAdded, output_index=self._index, item=self.item)

    def add(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        self._texts.append(text)
        if not isinstance(self.item, item_schemas.FunctionCallItem):
            return b""  # only its whole arguments say what the call is
        where = {"output_index": self._index, "item_id": self.item.id}
        return self._write(schemas.ArgumentsDelta, **where, delta=text)

    def close(self, status: item_schemas.ItemStatus) -> bytes:
        self.item = item = self._made(status)
        where: dict[str, Any] = {"output_index": self._index}
        done = b""
        match item:
            case item_schemas.FunctionCallItem():
                fields = {"item_id": item.id, "name": item.name, "arguments": item.arguments}
                done = self._write(schemas.ArgumentsDone, **where, **fields)
            case item_schemas.CustomToolCallItem():
                of = {"item_id": item.id, **where}
                done = self._write(schemas.CustomInputDelta, **of, delta=item.input)
                done += self._write(schemas.CustomInputDone, **of, input=item.input)
        return done + self._write(schemas.OutputItemDone, **where, item=item)

    def _made(self, status: item_schemas.ItemStatus) -> item_schemas.CallItem:
        arguments = "".join(self._texts)
        start = self._start
        return self._offers.item(start.name, arguments, start.id, status=status, **self._head)


OpenItem = TextItem | CallItem


def open_item(
    event: Event,
    response_id: str,
    index: int,
    events: EventWriter,
    offers: Offers,
    *,
    seals: bool,
) -> OpenItem:
    """The item that an event begins; its id is as unique as the response's."""
    unique = item_id("", response_id, index)
    head: dict[str, Any] = {"status": "in_progress"}
    match event:
        case ToolStart():
            return CallItem(event, {"id": f"fc_{unique}"}, index, events, offers)
        case Reasoning():
            head |= {"id": f"rs_{unique}", "summary": [], "content": []}
            return TextItem(item_schemas.ReasoningItem(**head), index, events, seals=seals)
    head |= {"id": f"msg_{unique}", "role": "assistant", "content": []}
    return TextItem(item_schemas.MessageItem(**head), index, events, seals=False)


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of one item of a response."""
    return f"{prefix}{response_id.removeprefix('resp_')}{index:04x}"
