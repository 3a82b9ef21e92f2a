"""From the content blocks of Anthropic's messages to the messages of a chat."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from asyncllm.errors import BadRequest
from asyncllm.server.anthropic import requests
from asyncllm.server.chat.adapter import convert_part, tool_call
from asyncllm.server.chat.messages import result_content

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Blocks whose meaning would be lost with them, as the text of a user's turn speaks of them.
_NEEDED: Final = frozenset(("image", "document", "audio", "video"))
#: Fields of blocks that tell a model nothing.
_SILENT: Final = frozenset(
    (
        *("type", "id", "tool_use_id", "cache_control", "caller", "citations", "page_age"),
        *("encrypted_content", "encrypted_index", "encrypted_stdout"),
    )
)
#: Values that tell a model nothing; a zero does.
_NOTHING: Final[tuple[Any, ...]] = (None, "", [], {})


def read_messages(
    system: str | Sequence[requests.TextBlock] | None,
    turns: Sequence[requests.InputTurn],
    left_out: list[str],
) -> list[dict[str, Any]]:
    """Messages of a chat; consecutive messages of one role become one.

    Args:
        left_out: gets names for the blocks that this server cannot read.

    Raises:
        BadRequest: a block is malformed, or of no use to the role, or there is none.
    """
    reader = _Reader(left_out)
    if system:
        reader.current("system").texts.append(_joined(system))
    for i, turn in enumerate(turns):
        if turn.content is None or isinstance(turn.content, str):
            reader.current(turn.role).texts.append(turn.content or "")
            continue
        for j, block in enumerate(turn.content):
            reader.read(block, turn.role, f"messages[{i}].content[{j}]")
    if all(message.role == "system" for message in reader.messages):
        raise BadRequest("messages has no content", param="messages")
    return [message.whole() for message in reader.messages]


@dataclass
class _Message:
    """A chat message, collected from blocks."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    def whole(self) -> dict[str, Any]:
        content = "\n".join(self.texts) if self.texts else None
        thought = {"reasoning_content": "".join(self.thoughts)} if self.thoughts else {}
        return {"role": self.role, "content": content, **thought, **self.fields}


class _Reader:
    def __init__(self, left_out: list[str]):
        self.messages: list[_Message] = []
        self._left_out = left_out

    def current(self, role: str) -> _Message:
        """The message to which the next block of a role belongs."""
        if role == "system" or not self.messages or self.messages[-1].role != role:
            self.messages.append(_Message(role))
        return self.messages[-1]

    def read(self, given: dict[str, Any], role: str, where: str) -> None:
        name = given.get("type")
        kind = requests.BLOCK_KINDS.get(name) if isinstance(name, str) else None
        if name in requests.BLOCKS_OF[role] and kind is not None:
            self._read_known(convert_part(given, kind, where), role, where)
        elif role == "assistant" and isinstance(name, str) and kind is None:
            self.current(role).texts.append(_told(given))
        elif (text := _plain_text(given)) is not None and role == "user":
            self.current(role).texts.append(text)
        elif not isinstance(name, str) or kind is not None or name in _NEEDED:
            problem = f"content of type {name!r} is not supported for the role {role}"
            raise BadRequest(f"{where}: {problem}", param=f"{where}.type")
        else:
            self._left_out.append(f"{where}.{name}")

    def _read_known(self, block: requests.Block, role: str, where: str) -> None:
        match block:
            case requests.TextBlock(text=text):
                self.current(role).texts.append(text or "")
            case requests.ThinkingBlock(thinking=text):
                self.current("assistant").thoughts.append(text or "")
            case requests.ToolUseBlock() as call:
                calls = self.current("assistant").fields.setdefault("tool_calls", [])
                calls.append(tool_call(call.id, call.name, call.input))
            case requests.ToolResultBlock() as result:
                text = self._result(result.content, f"{where}.content")
                fields = {"tool_call_id": result.tool_use_id} if result.tool_use_id else {}
                self.messages.append(_Message("tool", [text], fields=fields))

    def _result(self, content: Any, where: str) -> str:
        """What a tool returned, as text; the model should know of what is no text."""
        content = result_content(content)
        if not isinstance(content, list):
            return content or ""
        texts = []
        for i, given in enumerate(content):
            name = given.get("type")
            if name == "text":
                texts.append(convert_part(given, requests.TextBlock, f"{where}[{i}]").text or "")
            elif (text := _plain_text(given)) is not None:
                texts.append(text)
            elif name in _NEEDED:
                self._left_out.append(f"{where}[{i}].{name}")
                texts.append(f"[{name}]")
            else:
                texts.append(_told(given))
        return "\n".join(texts)


def _plain_text(given: dict[str, Any]) -> str | None:
    """The text of a document or of a result of a search; None if it is none."""
    match given:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            texts = [text]
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            texts = [text]
        case {"type": "document", "source": {"type": "content", "content": list(parts)}} | {
            "type": "search_result",
            "content": list(parts),
        }:
            texts = [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
        case _:
            return None
    heads = [
        given[name] for name in ("title", "source", "context") if isinstance(given.get(name), str)
    ]
    return "\n".join(map(str, heads + texts))


def _told(given: dict[str, Any]) -> str:
    """What another server's tool did or found, as text."""
    name, said = given.get("type"), _without_silent(given)
    return f"[{name}: {json.dumps(said, ensure_ascii=False)}]" if said else f"[{name}]"


def _without_silent(value: Any) -> Any:
    if isinstance(value, dict):
        told = {k: v for k, v in value.items() if k not in _SILENT and v not in _NOTHING}
        return {k: _without_silent(v) for k, v in told.items()}
    if isinstance(value, list):
        return [_without_silent(each) for each in value]
    return value


def _joined(content: str | Sequence[requests.TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text or "" for block in content)
