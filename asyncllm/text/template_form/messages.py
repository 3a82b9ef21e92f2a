"""Chat messages as clients send them, read into copies; and whether a prompt has all their text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from asyncllm.errors import BadRequest
from asyncllm.text.reasoning import CHANNEL_ENDS, REASONING_MARKS

#: A message of a chat: a role, content, and for calls what OpenAI's API has.
Message: TypeAlias = dict[str, Any]

#: Names under which a message's reasoning is sent; the first is the one most templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
#: Templates leave out what an answer has before these: it is reasoning.
_REASONING_ENDS: Final = (
    *(mark for _, ends, _ in REASONING_MARKS.values() for mark in ends),
    *CHANNEL_ENDS,
)


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


def is_lost(messages: Sequence[Message], prompt: str) -> bool:
    """Whether a text of checked messages is missing in the prompt that was made of them.

    A text may stand there as JSON, and each of its lines may be stripped or indented.
    """
    at = 0  # texts mostly come in their order
    for text in _texts(messages):
        found = prompt.find(text, at)
        if found < 0:
            found = prompt.find(text)
        if found < 0:
            found = _find_lines(text, prompt)
        if found < 0:
            return True
        at = found
    return False


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message.get("content", "")
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        for text in texts:
            if message["role"] == "assistant":
                text = text[max(_end_of(mark, text) for mark in _REASONING_ENDS) :]
            if stripped := text.strip():
                yield stripped


def _end_of(mark: str, text: str) -> int:
    at = text.rfind(mark)
    return 0 if at < 0 else at + len(mark)


def _find_lines(text: str, prompt: str) -> int:
    """The place of the last line of a text, if all of them come in their order, else -1.

    Each may be written as JSON.
    """
    at = 0
    for line in map(str.strip, text.splitlines()):
        forms = (line, _as_json(line, ascii=False), _as_json(line, ascii=True))
        at = next((found for form in forms if (found := prompt.find(form, at)) >= 0), -1)
        if at < 0:
            return -1
    return at


def _as_json(text: str, *, ascii: bool) -> str:
    return json.dumps(text, ensure_ascii=ascii)[1:-1]
