"""From the items of a conversation to the messages of a chat."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncllm.server.chat.adapter import tool_call
from asyncllm.server.responses import item_schemas as items
from asyncllm.server.responses.sealed import unseal
from asyncllm.server.responses.tools import INPUT, joined_name, shell_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence


def messages_of(given: Sequence[items.Item]) -> list[dict[str, Any]]:
    """Chat messages; consecutive reasoning, text and calls of the assistant become one message."""
    messages: list[_Message] = []
    for item in given:
        match item:
            case items.MessageItem(role=role):
                last = messages[-1] if messages else None
                # Text joins preceding reasoning and calls.
                if role != "assistant" or not (last and last.takes_text()):
                    messages.append(last := _Message(role))
                last.texts.append(_joined(item.content))
            case items.ReasoningItem():
                thought = _joined(item.content or item.summary)
                messages.append(_Message("assistant", fields={"reasoning_content": thought}))
            case items.CompactionItem():
                summary = unseal(item.encrypted_content) or ""
                told = f"Summary of the conversation before this point:\n\n{summary}"
                messages.append(_Message("user", [told]))
            case items.FunctionCallOutputItem() | items.CustomToolCallOutputItem():
                messages.append(_result(item.call_id, item.output))
            case items.ToolSearchOutputItem():
                messages.append(_result(item.call_id, _found(item.tools)))
            case items.AdditionalToolsItem():
                pass  # among the tools
            case _:
                if not messages or messages[-1].role != "assistant":
                    messages.append(_Message("assistant"))
                calls = messages[-1].fields.setdefault("tool_calls", [])
                calls.append(_call(item))
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


def _call(item: items.CallItem) -> dict[str, Any]:
    match item:
        case items.FunctionCallItem(name=name, arguments=arguments):
            name = joined_name(name, item.namespace or None)
        case items.CustomToolCallItem(name=name):
            name = joined_name(name, item.namespace or None)
            arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
        case items.LocalShellCallItem():
            name, arguments = "local_shell", shell_arguments(item.action)
        case items.ToolSearchCallItem():
            name, arguments = "tool_search", item.arguments
    return tool_call(item.call_id, name, arguments)


def _result(call_id: str, text: str) -> _Message:
    return _Message("tool", [text], {"tool_call_id": call_id} if call_id else {})


def _found(tools: Sequence[dict[str, Any]]) -> str:
    """The result of a search for tools: their names, as their definitions are among the tools."""
    names = []
    for tool in tools:
        space = tool.get("name") if tool.get("type") == "namespace" else None
        inner = tool.get("tools", ()) if space else (tool,)
        names += [joined_name(str(each.get("name")), space) for each in inner]
    return f"Found: {', '.join(names)}" if names else "Found no tools"


def _joined(parts: Sequence[items.Part]) -> str:
    return "\n".join(part.text for part in parts)
