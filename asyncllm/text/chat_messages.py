"""OpenAI's chat messages, brought into the form that a chat template expects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncllm.errors import BadRequest

# Names under which a message's reasoning is sent; the first is the one most templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class MessageForm(msgspec.Struct, frozen=True):
    """The form of messages that one template takes; the defaults suit most templates.

    Attributes:
        keep_parts: content given as a list of text parts stays a list; otherwise the texts are
            joined with newlines.
        keep_developer: the role "developer" stays; otherwise it becomes "system".
        parse_arguments: the arguments of tool calls become objects; otherwise they stay JSON text.
        no_content: added to an assistant's message without content: nothing, "" or None.
    """

    keep_parts: bool = False
    keep_developer: bool = False
    parse_arguments: bool = True
    no_content: Mapping[str, str | None] = {}

    def apply(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of the messages in this form.

        Keys that are None are dropped, as in transformers: templates test for the key. Reasoning
        sent under any of its names appears under the usual ones.

        Raises:
            BadRequest: a message is not an object with a role, a content part is not text, or
                arguments are not a JSON object.
        """
        if not messages:
            raise BadRequest("messages must not be empty", param="messages")
        return [self._apply_to(message) for message in messages]

    def _apply_to(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRequest("each message must be an object with a role", param="messages")
        formed = {key: value for key, value in message.items() if value is not None}
        if formed["role"] == "developer" and not self.keep_developer:
            formed["role"] = "system"
        if "content" in formed:
            formed["content"] = self._content(formed["content"])
        elif formed["role"] == "assistant":
            formed.update(self.no_content)
        if self.parse_arguments and isinstance(calls := formed.get("tool_calls"), list):
            formed["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        reasoning = next((formed[name] for name in _REASONING_FIELDS if name in formed), None)
        if reasoning is not None:
            formed = {"thinking": reasoning, **formed, "reasoning_content": reasoning}
        return formed

    def _content(self, content: object) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise BadRequest("content must be a string or a list of parts", param="messages")
        texts = [_part_text(part) for part in content]
        if self.keep_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def _part_text(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": kind}:
            message = f"content part of type {kind!r} is not supported: only text"
        case _:
            message = "each content part must be an object with a type"
    raise BadRequest(message, param="messages")


def _with_parsed_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                arguments = json.loads(text or "{}")
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"arguments of a tool call: {error}", param="messages") from error
            if not isinstance(arguments, dict):
                raise BadRequest("arguments of a tool call must be a JSON object", param="messages")
            return {**call, "function": {**function, "arguments": arguments}}
    return call
