"""The items of a response's output while they grow, and the events about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.server.responses import schemas
from asyncllm.server.streaming.frames import named_event
from asyncllm.text.parsing import Content, Event, Reasoning, ToolArguments, ToolStart

if TYPE_CHECKING:
    from asyncllm.server.openai.schemas import TokenLogprob


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
        self, item: schemas.MessageItem | schemas.ReasoningItem, index: int, events: EventWriter
    ):
        self.item = item
        self._reasoning = isinstance(item, schemas.ReasoningItem)
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

    def close(self, status: schemas.ItemStatus) -> bytes:
        text = "".join(self._texts)
        part = self._part(text)
        self.item.status, self.item.content = status, [part]
        if self._reasoning:
            done = self._write(schemas.ReasoningDone, **self._where, text=text)
        else:
            fields = {"text": text, "logprobs": self._logprobs}
            done = self._write(schemas.TextDone, **self._where, **fields)
        done += self._write(schemas.ContentPartDone, **self._where, part=part)
        return done + self._write(schemas.OutputItemDone, output_index=self._index, item=self.item)

    def _part(self, text: str) -> Any:
        if self._reasoning:
            return schemas.ReasoningText(text)
        return schemas.OutputText(text=text, annotations=[], logprobs=self._logprobs)


class CallItem:
    """A call of a function.

    Attributes:
        item: has no arguments until it is closed.
    """

    def __init__(self, item: schemas.FunctionCallItem, index: int, events: EventWriter, call: int):
        self.item = item
        self._call = call
        self._index = index
        self._write = events.write
        self._texts: list[str] = []

    def takes(self, event: Event) -> bool:
        """Whether an event goes on with this item."""
        return isinstance(event, ToolArguments) and event.index == self._call

    def open(self) -> bytes:
        return self._write(schemas.OutputItemAdded, output_index=self._index, item=self.item)

    def add(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        self._texts.append(text)
        where = {"output_index": self._index, "item_id": self.item.id}
        return self._write(schemas.ArgumentsDelta, **where, delta=text)

    def close(self, status: schemas.ItemStatus) -> bytes:
        item, where = self.item, {"output_index": self._index}
        item.status, item.arguments = status, "".join(self._texts)
        fields = {"item_id": item.id, "name": item.name, "arguments": item.arguments}
        done = self._write(schemas.ArgumentsDone, **where, **fields)
        return done + self._write(schemas.OutputItemDone, **where, item=item)


OpenItem = TextItem | CallItem


def open_item(event: Event, response_id: str, index: int, events: EventWriter) -> OpenItem:
    """The item that an event begins; its id is as unique as the response's."""
    unique = f"{response_id.removeprefix('resp_')}{index:04x}"
    head: dict[str, Any] = {"status": "in_progress"}
    match event:
        case ToolStart(call, call_id, name):
            head |= {"id": f"fc_{unique}", "call_id": call_id, "name": name, "arguments": ""}
            return CallItem(schemas.FunctionCallItem(**head), index, events, call)
        case Reasoning():
            head |= {"id": f"rs_{unique}", "summary": [], "content": []}
            return TextItem(schemas.ReasoningItem(**head), index, events)
    head |= {"id": f"msg_{unique}", "role": "assistant", "content": []}
    return TextItem(schemas.MessageItem(**head), index, events)
