"""The items of a response's input: checked, given ids, and turned into chat messages."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.adapter import convert_part, tool_call
from asyncllm.server.responses import requests, schemas

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncllm.server.responses.store import StoredItem

decode_item = msgspec.json.Decoder[schemas.Item](schemas.Item).decode

_TEXT_PARTS: Final = frozenset(("input_text", "output_text", "text"))


def referred_ids(given: str | list[dict[str, Any]]) -> set[str]:
    """The ids of the stored items to which an input refers."""
    if isinstance(given, str):
        return set()
    kinds = ("item_reference", None)
    ids = (item.get("id") for item in given if item.get("type") in kinds and "role" not in item)
    return {id for id in ids if isinstance(id, str)}


def read_items(
    given: str | list[dict[str, Any]], found: Mapping[str, StoredItem], limit: int
) -> list[schemas.Item]:
    """The items of an input, each with an id.

    Args:
        found: the stored items among ``referred_ids``.
        limit: the most bytes of stored items.

    Raises:
        BadRequest: an item is malformed, not supported, or not found, or the stored items are
            longer than ``limit``.
    """
    if isinstance(given, str):
        return [_message(requests.InputMessage("user", given), "input")]
    items = [_item(item, f"input[{i}]") for i, item in enumerate(given)]
    for i, item in enumerate(items):
        if isinstance(item, requests.InputReference) and item.id not in found:
            raise BadRequest(f"item {item.id!r} not found", param=f"input[{i}].id")
    references = (item.id for item in items if isinstance(item, requests.InputReference))
    if sum(len(found[id].json) for id in references) > limit:
        raise BadRequest(f"the items referred to have more than {limit} bytes", param="input")
    referred = {id: decode_item(item.json) for id, item in found.items()}
    return [
        referred[item.id] if isinstance(item, requests.InputReference) else item for item in items
    ]


def read_history(stored: Sequence[StoredItem], limit: int) -> list[schemas.Item]:
    """The items of a conversation that is continued.

    Raises:
        BadRequest: they are more than one request may have, or more than ``limit`` bytes.
    """
    if len(stored) > requests.MAX_ITEMS or sum(len(item.json) for item in stored) > limit:
        raise BadRequest(
            f"the conversation has more than {requests.MAX_ITEMS} items or {limit} bytes",
            param="previous_response_id",
        )
    return [decode_item(item.json) for item in stored]


def _item(given: dict[str, Any], where: str) -> schemas.Item | requests.InputReference:
    name = given.get("type")
    if name is None:
        name = "message" if "role" in given else "item_reference"
    kind = requests.ITEM_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise BadRequest(f"items of type {name!r} are not supported", param=f"{where}.type")
    item: requests.InputItem = convert_part(given, kind, where)
    match item:
        case requests.InputReference():
            return item
        case requests.InputMessage():
            return _message(item, where)
        case requests.InputCall():
            return schemas.FunctionCallItem(
                id=item.id or _new_id("fc"),
                status="completed",
                call_id=item.call_id,
                name=item.name,
                arguments=item.arguments,
            )
        case requests.InputCallOutput():
            return schemas.FunctionCallOutputItem(
                id=item.id or _new_id("fco"),
                status="completed",
                call_id=item.call_id,
                output=_text(item.output, f"{where}.output"),
            )
        case requests.InputReasoning():
            return _reasoning(item)


def _message(item: requests.InputMessage, where: str) -> schemas.MessageItem:
    text = _text(item.content, f"{where}.content")
    output = item.role == "assistant"
    part = schemas.OutputText(text=text, annotations=[]) if output else schemas.InputText(text)
    id = item.id or _new_id("msg")
    return schemas.MessageItem(id=id, status="completed", role=item.role, content=[part])


def _reasoning(item: requests.InputReasoning) -> schemas.ReasoningItem:
    return schemas.ReasoningItem(
        id=item.id or _new_id("rs"),
        summary=[schemas.SummaryText(part.text) for part in item.summary or ()],
        content=[schemas.ReasoningText(part.text) for part in item.content or ()] or msgspec.UNSET,
    )


def _text(content: str | list[requests.InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise BadRequest(f"content of type {part.type!r} is not supported", param=where)
        if part.text is None:
            raise BadRequest(f"{where}[{i}].text is required", param=f"{where}[{i}].text")
    return "\n".join(part.text for part in content if part.text is not None)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def messages_of(items: Sequence[schemas.Item]) -> list[dict[str, Any]]:
    """Chat messages; consecutive reasoning, text and calls of the assistant become one message."""
    messages: list[_Message] = []
    for item in items:
        match item:
            case schemas.MessageItem(role=role):
                last = messages[-1] if messages else None
                # Text joins preceding reasoning and calls.
                if role != "assistant" or not (last and last.takes_text()):
                    messages.append(last := _Message(role))
                last.texts.append(_joined(item.content))
            case schemas.FunctionCallItem():
                if not messages or messages[-1].role != "assistant":
                    messages.append(_Message("assistant"))
                calls = messages[-1].fields.setdefault("tool_calls", [])
                calls.append(tool_call(item.call_id, item.name, item.arguments))
            case schemas.FunctionCallOutputItem():
                tool = {"tool_call_id": item.call_id}
                messages.append(_Message("tool", [item.output], tool))
            case schemas.ReasoningItem():
                thought = _joined(item.content or item.summary)
                messages.append(_Message("assistant", fields={"reasoning_content": thought}))
    return [message.whole() for message in messages]


@dataclass
class _Message:
    """A chat message, collected from items."""

    role: str
    texts: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    def takes_text(self) -> bool:
        """Whether the assistant's next text belongs to it."""
        return self.role == "assistant" and (not self.texts or "tool_calls" in self.fields)

    def whole(self) -> dict[str, Any]:
        only_calls = not self.texts and "tool_calls" in self.fields
        content = None if only_calls else "".join(self.texts)
        return {"role": self.role, "content": content, **self.fields}


def _joined(parts: Sequence[schemas.Part]) -> str:
    return "\n".join(part.text for part in parts)
