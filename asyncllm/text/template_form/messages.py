"""Reads chat messages as clients send them, into copies that the rest of the package may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from asyncllm.errors import BadRequest

#: A message of a chat: a role, content, and for calls what OpenAI's API has.
Message: TypeAlias = dict[str, Any]

#: Names under which a message's reasoning is sent; the first is the one most templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def checked(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages, without what means nothing.

    Keys that are None are dropped, as in transformers: templates test for the key. So are empty
    lists of calls. Reasoning sent under any of its names appears under the usual ones, OpenAI's
    older calls of functions become tool calls, and a refusal becomes text.

    Raises:
        BadRequest: a message is not an object with a role, or its content is not text.
    """
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    return [_checked(message) for message in messages]


def text_of(message: Message) -> str:
    """The text of a checked message; "" if it has none."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The calls that a checked message makes."""
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


def _checked(message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest("each message must be an object with a role", param="messages")
    formed = {key: value for key, value in message.items() if value is not None}
    if formed["role"] == "function":
        formed["role"] = "tool"
    if formed["role"] == "assistant":
        _read_answer(formed)
    elif formed["role"] == "tool":
        formed.setdefault("content", "")
    if "content" in formed:
        formed["content"] = _content(formed["content"])
    elif formed["role"] != "assistant":
        raise BadRequest("a message has no content", param="messages")
    reasoning = next((formed[name] for name in _REASONING_FIELDS if name in formed), None)
    if reasoning is not None:
        formed = {"thinking": reasoning, **formed, "reasoning_content": reasoning}
    return formed


def _read_answer(formed: Message) -> None:
    """The parts that only an assistant's message has."""
    if formed.get("content") == []:
        del formed["content"]
    if "refusal" in formed:
        refusal = formed.pop("refusal")
        formed.setdefault("content", refusal)
    if "function_call" in formed:
        call = {"type": "function", "function": formed.pop("function_call")}
        formed.setdefault("tool_calls", [call])
    calls = formed.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise BadRequest("tool_calls must be a list", param="messages")
        formed["tool_calls"] = [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    match call:
        case {"function": {"name": str() | None as name} as function}:
            return {**call, "type": "function", "function": {**function, "name": name or ""}}
        case {"custom": {"name": str(name)} as custom}:  # OpenAI's calls with text for arguments
            function = {"name": name, "arguments": {"input": custom.get("input", "")}}
            rest = {key: value for key, value in call.items() if key != "custom"}
            return {**rest, "type": "function", "function": function}
    raise BadRequest("a tool call must name a function", param="messages")


def _content(content: object) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("content must be a string or a list of parts", param="messages")
    return [{"type": "text", "text": _part_text(part)} for part in content]


def _part_text(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind}:
            message = f"content part of type {kind!r} is not supported: only text"
        case _:
            message = "each content part must be an object with a type"
    raise BadRequest(message, param="messages")
