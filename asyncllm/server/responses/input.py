"""The items of a response's input: checked, given ids, and turned into chat messages."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.http.parse import invalid
from asyncllm.server.responses.requests import (
    ITEM_KINDS,
    MAX_ITEMS,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputPart,
    InputReasoning,
    InputReference,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncllm.server.responses.store import StoredItem

#: An item in the form that is stored and listed, which is OpenAI's.
Item = dict[str, Any]

_decode = msgspec.json.Decoder(Item).decode

_TEXT_PARTS: Final = frozenset(("input_text", "output_text", "text"))


def referred_ids(given: str | list[dict[str, Any]]) -> set[str]:
    """The ids of the stored items that an input refers to."""
    if isinstance(given, str):
        return set()
    kinds = ("item_reference", None)
    ids = (item.get("id") for item in given if item.get("type") in kinds and "role" not in item)
    return {id for id in ids if isinstance(id, str)}


def read_items(
    given: str | list[dict[str, Any]], found: Mapping[str, StoredItem], limit: int
) -> list[Item]:
    """What was given as input, every item with an id and a status.

    Args:
        found: the stored items of ``referred_ids``, as far as there are any.
        limit: bytes of all the items that are referred to.

    Raises:
        BadRequest: an item is malformed, of a kind that is not supported, or refers to none; or
            they refer to too much.
    """
    if isinstance(given, str):
        return [_message(InputMessage("user", given), "input")]
    items = [_item(item, f"input[{i}]") for i, item in enumerate(given)]
    for i, item in enumerate(items):
        if isinstance(item, InputReference) and item.id not in found:
            raise BadRequest(f"item {item.id!r} not found", param=f"input[{i}].id")
    references = (item.id for item in items if isinstance(item, InputReference))
    if sum(len(found[id].json) for id in references) > limit:
        raise BadRequest(f"the items referred to have more than {limit} bytes", param="input")
    referred = {id: _decode(item.json) for id, item in found.items()}
    return [referred[item.id] if isinstance(item, InputReference) else item for item in items]


def read_history(stored: Sequence[StoredItem], limit: int) -> list[Item]:
    """The items of a conversation that is continued.

    Raises:
        BadRequest: they are more than one request may have, or more than ``limit`` bytes.
    """
    if len(stored) > MAX_ITEMS or sum(len(item.json) for item in stored) > limit:
        raise BadRequest(
            f"the conversation has more than {MAX_ITEMS} items or {limit} bytes",
            param="previous_response_id",
        )
    return [_decode(item.json) for item in stored]


def _item(given: dict[str, Any], where: str) -> Item | InputReference:
    name = given.get("type")
    if name is None:
        name = "message" if "role" in given else "item_reference"
    kind = ITEM_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise BadRequest(f"items of type {name!r} are not supported", param=f"{where}.type")
    item = _converted(given, kind, where)
    match item:
        case InputReference():
            return item
        case InputMessage():
            return _message(item, where)
        case InputCall():
            return {
                "id": item.id or new_id("fc"),
                "type": "function_call",
                "status": "completed",
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.arguments,
            }
        case InputCallOutput():
            return {
                "id": item.id or new_id("fco"),
                "type": "function_call_output",
                "status": "completed",
                "call_id": item.call_id,
                "output": _text(item.output, f"{where}.output"),
            }
        case InputReasoning():
            return _reasoning(item)


def _converted(given: dict[str, Any], kind: type[InputItem], where: str) -> InputItem:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        problem = invalid(error)
        inside = f"{where}.{problem.param}" if problem.param else where
        raise BadRequest(f"{where}: {problem.message}", param=inside) from None


def _message(item: InputMessage, where: str) -> Item:
    text = _text(item.content, f"{where}.content")
    part: dict[str, Any] = {"type": "input_text", "text": text}
    if item.role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": []}
    return {
        "id": item.id or new_id("msg"),
        "type": "message",
        "status": "completed",
        "role": item.role,
        "content": [part],
    }


def _reasoning(item: InputReasoning) -> Item:
    whole: Item = {
        "id": item.id or new_id("rs"),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": part.text} for part in item.summary or ()],
    }
    if item.content:
        whole["content"] = [{"type": "reasoning_text", "text": part.text} for part in item.content]
    return whole


def _text(content: str | list[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise BadRequest(f"content of type {part.type!r} is not supported", param=where)
        if part.text is None:
            raise BadRequest(f"{where}[{i}].text is required", param=f"{where}[{i}].text")
    return "\n".join(part.text for part in content if part.text is not None)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Chat messages; reasoning, text and calls of one turn of the assistant become one message."""
    messages: list[_Message] = []
    for item in items:
        match item:
            case {"type": "message", "role": role, "content": parts}:
                last = messages[-1] if messages else None
                # Text joins what the assistant has thought, and calls that it goes on after.
                if role != "assistant" or not (last and last.may_go_on()):
                    messages.append(last := _Message(role))
                last.texts.append(_joined(parts))
            case {"type": "function_call", "name": name, "arguments": arguments}:
                function = {"name": name, "arguments": arguments}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if not messages or messages[-1].role != "assistant":
                    messages.append(_Message("assistant"))
                messages[-1].fields.setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "output": output}:
                tool = {"tool_call_id": item["call_id"]}
                messages.append(_Message("tool", [output], tool))
            case {"type": "reasoning"}:
                thought = _joined(item.get("content") or item["summary"])
                messages.append(_Message("assistant", fields={"reasoning_content": thought}))
    return [message.whole() for message in messages]


@dataclass
class _Message:
    """A chat message, being made."""

    role: str
    texts: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    def may_go_on(self) -> bool:
        """Whether the next text of the assistant belongs to it."""
        return self.role == "assistant" and (not self.texts or "tool_calls" in self.fields)

    def whole(self) -> dict[str, Any]:
        called = not self.texts and "tool_calls" in self.fields
        content = None if called else "".join(self.texts)
        return {"role": self.role, "content": content, **self.fields}


def _joined(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)
