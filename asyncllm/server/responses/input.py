"""The items of a response's input: checked, given ids, and read as items that this server keeps."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.adapter import convert_part
from asyncllm.server.responses import item_schemas as items
from asyncllm.server.responses import requests
from asyncllm.server.responses.item_schemas import unseal
from asyncllm.server.responses.store import StoredItem

decode_item = msgspec.json.Decoder[items.Item](items.Item).decode

_TEXT_PARTS: Final = frozenset(("input_text", "output_text", "text", "summary_text"))
#: Fields of items that tell a model nothing.
_SILENT: Final = frozenset(("type", "id", "status", "call_id", "caller", "encrypted_content"))


def referred_ids(given: str | list[dict[str, Any]] | None) -> set[str]:
    """The ids of the stored items to which an input refers."""
    if given is None or isinstance(given, str):
        return set()
    kinds = ("item_reference", None)
    ids = (item.get("id") for item in given if item.get("type") in kinds and "role" not in item)
    return {id for id in ids if isinstance(id, str)}


class ReadInput:
    """The items of an input.

    Attributes:
        items: each has an id.
        left_out: names for what this server cannot read.
        compacts: whether the answer is to be a compaction.
    """

    def __init__(
        self, given: str | list[dict[str, Any]], found: Mapping[str, StoredItem], limit: int
    ):
        """
        Args:
            found: the stored items among ``referred_ids``.
            limit: the most bytes of stored items.

        Raises:
            BadRequest: an item is malformed or not found, all are of other servers, or the stored
                items are longer than ``limit``.
        """
        self.items: list[items.Item] = []
        self.left_out: list[str] = []
        self.compacts = False
        self._foreign = 0
        if isinstance(given, str):
            given = [{"type": "message", "role": "user", "content": given}]
        size = 0
        for i, item in enumerate(given):
            read = self._item(item, f"input[{i}]")
            if isinstance(read, requests.InputReference):
                if read.id not in found:
                    raise BadRequest(f"item {read.id!r} not found", param=f"input[{i}].id")
                size += len(found[read.id].json)
                if size > limit:
                    problem = f"the items referred to have more than {limit} bytes"
                    raise BadRequest(problem, param="input")
                read = decode_item(found[read.id].json)
            if read is not None:
                self.items.append(read)
        if given and self._foreign == len(given):
            problem = f"items of type {given[0]['type']!r} are not supported"
            raise BadRequest(problem, param="input[0].type")

    def _item(
        self, given: dict[str, Any], where: str
    ) -> items.Item | requests.InputReference | None:
        name = given.get("type")
        if name is None:
            name = "message" if "role" in given else "item_reference"
        if not isinstance(name, str):
            raise BadRequest(f"{where}.type must be a string", param=f"{where}.type")
        if (kind := requests.ITEM_KINDS.get(name)) is None:
            return self._other(given, name, where)
        item = convert_part(given, kind, where)
        match item:
            case requests.InputReference():
                return item
            case requests.InputMessage():
                return self._message(item, where)
            case requests.InputCall():
                head = _call("fc", item.id, item.call_id, item.namespace)
                text = _text(item.arguments)
                return items.FunctionCallItem(name=item.name or "", arguments=text, **head)
            case requests.InputCustomCall():
                head = _call("ctc", item.id, item.call_id, item.namespace)
                text = "" if item.input is None else _text(item.input)
                return items.CustomToolCallItem(name=item.name, input=text, **head)
            case requests.InputShellCall():
                head = _call("lsh", item.id, item.call_id)
                return items.LocalShellCallItem(action=item.action, **head)
            case requests.InputSearchCall(call_id=str(call_id)):
                head = _call("tsc", item.id, None) | {"call_id": call_id, "execution": "client"}
                return items.ToolSearchCallItem(arguments=item.arguments, **head)
            case requests.InputSearchOutput(call_id=str(call_id)):
                head = _call("tso", item.id, None) | {"call_id": call_id, "execution": "client"}
                return items.ToolSearchOutputItem(tools=item.tools or [], **head)
            case requests.InputTools() | requests.InputSearchOutput():
                id = item.id or _new_id("at")
                return items.AdditionalToolsItem(id=id, role="developer", tools=item.tools or [])
            case requests.InputCallOutput() | requests.InputCustomCallOutput():
                output = self._output(item.output, f"{where}.output")
                if item.call_id is None and item.name is not None:
                    text = f"<{item.name}>\n{output}\n</{item.name}>"
                    return _message_item("user", text, item.id)
                head = _call("fco", item.id, None) | {"call_id": item.call_id or ""}
                if isinstance(item, requests.InputCallOutput):
                    return items.FunctionCallOutputItem(output=output, **head)
                return items.CustomToolCallOutputItem(output=output, **head)
            case requests.InputReasoning():
                return _reasoning(item)
            case requests.InputCompaction(encrypted_content=str(sealed)) if (
                unseal(sealed) is not None
            ):
                id = item.id or _new_id("cmp")
                return items.CompactionItem(id=id, encrypted_content=sealed)
            case requests.CompactionTrigger():
                self.compacts = True
                return None
        self.left_out.append(f"{where}.{name}")
        return None

    def _other(self, given: dict[str, Any], name: str, where: str) -> items.Item | None:
        """An item of a tool that this server does not know: a call, its result, or text."""
        id = given.get("id")
        call_id = given.get("call_id") or id
        told = {key: value for key, value in given.items() if key not in _SILENT and value}
        if name.endswith("_output") and isinstance(call_id, str):
            output = self._output(given.get("output", told), f"{where}.output")
            return items.FunctionCallOutputItem(output=output, **_call("fco", None, call_id))
        if not name.endswith("_call"):
            self._foreign += 1
            self.left_out.append(f"{where}.{name}")
            return None
        if isinstance(given.get("call_id"), str):
            head = _call("fc", None, None) | {"call_id": given["call_id"]}
            own = name.removesuffix("_call")
            return items.FunctionCallItem(name=own, arguments=_json(told), **head)
        self._foreign += 1
        told.pop("result", None)  # an image
        text = f"[{name}: {_json(told)}]" if told else f"[{name}]"
        return _message_item("assistant", text, None)

    def _message(self, item: requests.InputMessage, where: str) -> items.MessageItem:
        where = f"{where}.content"
        if item.content is None or isinstance(item.content, str):
            return _message_item(item.role, item.content or "", item.id)
        texts = []
        for i, part in enumerate(item.content):
            field = "refusal" if part.type == "refusal" else "text"
            if part.type in _TEXT_PARTS or field == "refusal":
                text: str | msgspec.UnsetType | None = getattr(part, field)
                if text is msgspec.UNSET:
                    missing = f"{where}[{i}].{field}"
                    raise BadRequest(f"{missing} is required", param=missing)
                texts.append(text or "")
            elif item.role != "assistant":
                raise BadRequest(f"content of type {part.type!r} is not supported", param=where)
            else:
                self.left_out.append(f"{where}[{i}].{part.type}")
        return _message_item(item.role, "\n".join(texts), item.id)

    def _output(self, given: Any, where: str) -> str:
        """What a tool returned, as text; the model should know of what is no text."""
        if not isinstance(given, list):
            return "" if given is None else _text(given)
        texts = []
        for i, part in enumerate(given):
            match part:
                case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
                    texts.append(text)
                case {"type": "input_image" | "input_file" | "input_audio" as kind}:
                    self.left_out.append(f"{where}[{i}].{kind}")
                    texts.append(f"[{kind}]")
                case _:
                    texts.append(_json(part))
        return "\n".join(texts)


def read_history(stored: Sequence[StoredItem], limit: int) -> list[items.Item]:
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


def _call(
    prefix: str, id: str | None, call_id: str | None, namespace: str | None = None
) -> dict[str, Any]:
    """What all calls have; without an id of its own a call gets one, which also names the call."""
    id = id or _new_id(prefix)
    space = {} if namespace is None else {"namespace": namespace}
    return {"id": id, "status": "completed", "call_id": call_id or id, **space}


def _message_item(role: Any, text: str, id: str | None) -> items.MessageItem:
    is_output = role == "assistant"
    part = items.OutputText(text=text, annotations=[]) if is_output else items.InputText(text)
    return items.MessageItem(id=id or _new_id("msg"), status="completed", role=role, content=[part])


def _reasoning(item: requests.InputReasoning) -> items.ReasoningItem:
    texts = [part.text for part in item.content or () if part.text]
    if not texts and (sealed := unseal(item.encrypted_content)) is not None:
        texts = [sealed]
    return items.ReasoningItem(
        id=item.id or _new_id("rs"),
        summary=[items.SummaryText(part.text) for part in item.summary or () if part.text],
        content=[items.ReasoningText(text) for text in texts] or msgspec.UNSET,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
