"""The items of a response's output, each with the events that tell how it came about.

An event here is its body without the ``sequence_number``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.server.http.answer import encode
from asyncllm.server.streaming.frames import TextEvents
from asyncllm.text.parsing import Content, Reasoning, ToolArguments, ToolStart

if TYPE_CHECKING:
    from asyncllm.text.parsing import Event

Body = dict[str, Any]


class TextItem:
    """A message, or the reasoning: one part with all of its text.

    Attributes:
        item: as OpenAI has it; its part is missing until it is done.
    """

    def __init__(self, id: str, index: int, *, reasoning: bool):
        self._takes = Reasoning if reasoning else Content
        self._kind = "reasoning_text" if reasoning else "output_text"
        self._reasoning = reasoning
        self.item: Body = {"id": id, "type": "message", "status": "in_progress", "content": []}
        self.item |= {"type": "reasoning", "summary": []} if reasoning else {"role": "assistant"}
        self._where = {"item_id": id, "output_index": index, "content_index": 0}
        self._deltas = TextEvents(
            {"type": f"response.{self._kind}.delta", **self._where, "delta": ""}
        )
        self._texts: list[str] = []
        self._logprobs: list[Body] = []

    def takes(self, event: Event) -> bool:
        """Whether an event goes on with this item."""
        return isinstance(event, self._takes)

    def added(self) -> list[Body]:
        return [
            _item_event("added", self.item, self._where["output_index"]),
            self._part_event("added", self._part("", [])),
        ]

    def add(self, text: str, logprobs: list[Body]) -> None:
        self._texts.append(text)
        self._logprobs += logprobs

    def delta(self, text: str, logprobs: list[Body], number: int) -> bytes:
        """The event of what was added, as the ``number``-th of its stream."""
        scores = b"" if self._reasoning else b',"logprobs":%b' % encode(logprobs)
        return self._deltas.write(text, b'%b,"sequence_number":%d' % (scores, number))

    def done(self, status: str) -> list[Body]:
        """The item is whole."""
        text = "".join(self._texts)
        part = self._part(text, self._logprobs)
        self.item |= {"status": status, "content": [part]}
        ended = {"type": f"response.{self._kind}.done", **self._where, "text": text}
        if not self._reasoning:
            ended["logprobs"] = self._logprobs
        return [
            ended,
            self._part_event("done", part),
            _item_event("done", self.item, self._where["output_index"]),
        ]

    def _part(self, text: str, logprobs: list[Body]) -> Body:
        part: Body = {"type": self._kind, "text": text}
        return part if self._reasoning else {**part, "annotations": [], "logprobs": logprobs}

    def _part_event(self, name: str, part: Body) -> Body:
        return {"type": f"response.content_part.{name}", **self._where, "part": part}


class CallItem:
    """A call of a function.

    Attributes:
        item: as OpenAI has it; it has no arguments until it is done.
    """

    def __init__(self, id: str, index: int, call: ToolStart):
        self._call = call
        self.item: Body = {"id": id, "type": "function_call", "status": "in_progress"}
        self.item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        self._where = {"item_id": id, "output_index": index}
        kind = "response.function_call_arguments.delta"
        self._deltas = TextEvents({"type": kind, **self._where, "delta": ""})
        self._texts: list[str] = []

    def takes(self, event: Event) -> bool:
        """Whether an event goes on with this item."""
        return isinstance(event, ToolArguments) and event.index == self._call.index

    def added(self) -> list[Body]:
        return [_item_event("added", self.item, self._where["output_index"])]

    def add(self, text: str, logprobs: list[Body]) -> None:
        self._texts.append(text)

    def delta(self, text: str, logprobs: list[Body], number: int) -> bytes:
        """The event of what was added, as the ``number``-th of its stream."""
        return self._deltas.write(text, b',"sequence_number":%d' % number)

    def done(self, status: str) -> list[Body]:
        """The item is whole."""
        text = "".join(self._texts)
        self.item |= {"status": status, "arguments": text}
        kind = "response.function_call_arguments.done"
        return [
            {"type": kind, **self._where, "name": self._call.name, "arguments": text},
            _item_event("done", self.item, self._where["output_index"]),
        ]


OutputItem = TextItem | CallItem


def begin_item(event: Event, response_id: str, index: int) -> OutputItem:
    """The item that an event begins; its id is as unique as the response's."""
    unique = f"{response_id.removeprefix('resp_')}{index:04x}"
    match event:
        case ToolStart():
            return CallItem(f"fc_{unique}", index, event)
        case Reasoning():
            return TextItem(f"rs_{unique}", index, reasoning=True)
        case _:
            return TextItem(f"msg_{unique}", index, reasoning=False)


def _item_event(name: str, item: Body, index: Any) -> Body:
    return {"type": f"response.output_item.{name}", "output_index": index, "item": item}
