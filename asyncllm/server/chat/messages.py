"""Reads the messages and tools of a chat in OpenAI's format, and has the template render them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import ChatMessage, ChatTool
from asyncllm.server.chat.tools import ToolFields, allow_tools, functions
from asyncllm.server.http.parse import invalid

if TYPE_CHECKING:
    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.model import Model

#: Template arguments that belong to the server, not to ``chat_template_kwargs``.
_RESERVED = frozenset(
    (
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "any_length",
    )
)

#: Values of ``reasoning_effort``; a template knows some of them.
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
#: Values with which clients say that the effort is the template's own.
_OWN_EFFORT: Final = (None, "", "default", "auto")
#: Types of parts that are text; some are those of the Responses API.
_TEXTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_OF_RESULTS: Final = ("tool", "function")
#: Begins the line with which Claude Code says whom to bill.
_BILLING: Final = "x-anthropic-billing-header:"


class _Chat(msgspec.Struct):
    messages: list[ChatMessage]
    tools: list[ChatTool] | None


class TemplateFields(ToolFields, Protocol):
    """The fields of a request that decide how messages become a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


class ChatFields(TemplateFields, Protocol):
    """What a client sends of a chat."""

    messages: Any


def read_chat(body: ChatFields) -> list[str]:
    """Check messages, tools and tool choice, and leave out what only another server could use.

    These are tools that the server would run itself, and in answers and results what is no text.
    With OpenAI's ``allowed_tools`` the other tools are left out, too: the model does not see them,
    so it cannot call them.

    Returns:
        Names for what was left out.

    Raises:
        BadRequest: a message, a tool or the choice is malformed, no tool is left to be called that
            must be, or a user's content is no text.
    """
    left_out: list[str] = []
    if body.tools is not None:
        body.tools = functions(body.tools, left_out) or None
    body.messages = _read_messages(body.messages or [], body.tools, left_out)
    allow_tools(body, left_out)
    return left_out


def _read_messages(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, left_out: list[str]
) -> list[dict[str, Any]]:
    messages = [
        {**message, "content": result_content(message["content"])}
        if message.get("role") in _OF_RESULTS and "content" in message
        else message
        for given in messages
        for message in _unpacked(given)
    ]
    try:
        chat = msgspec.convert({"messages": messages, "tools": tools}, type=_Chat)
    except msgspec.ValidationError as error:
        raise invalid(error, _Chat) from None
    pairs = enumerate(zip(messages, chat.messages, strict=True))
    return [_read_message(m, checked, f"messages[{i}]", left_out) for i, (m, checked) in pairs]


def _unpacked(given: dict[str, Any]) -> list[dict[str, Any]]:
    """A message as chat completions have it, of which calls or results are parts as in Messages."""
    parts, role = given.get("content"), given.get("role")
    kind = {"assistant": "tool_use", "user": "tool_result"}.get(str(role))
    if kind is None or not isinstance(parts, list):
        return [given]
    found = [part for part in parts if isinstance(part, dict) and part.get("type") == kind]
    rest = [part for part in parts if not isinstance(part, dict) or part.get("type") != kind]
    if not found:
        return [given]
    if role == "assistant":
        calls = [
            {
                "id": part.get("id"),
                "type": "function",
                "function": {"name": part.get("name"), "arguments": part.get("input")},
            }
            for part in found
        ]
        return [{**given, "content": rest or None, "tool_calls": calls}]
    results = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content")}
        for part in found
    ]
    return [*results, {**given, "content": rest}] if rest else results


def result_content(given: Any) -> str | list[dict[str, Any]] | None:
    """What a tool has returned, as text or parts; JSON that is neither becomes text."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, list) and all(isinstance(part, dict) and "type" in part for part in given):
        return given
    return json.dumps(given, ensure_ascii=False)


def _read_message(
    given: dict[str, Any], message: ChatMessage, where: str, left_out: list[str]
) -> dict[str, Any]:
    for i, call in enumerate(message.tool_calls or ()):
        if call.function is None and call.custom is None:
            missing = f"{where}.tool_calls[{i}].function"
            raise BadRequest(f"{missing} is required", param=missing)
    where = f"{where}.content"
    if message.content is None and message.role in ("system", "developer", "user"):
        if "content" not in given:
            raise BadRequest(f"{where} is required", param=where)
        return {**given, "content": ""}
    if not isinstance(message.content, list):
        return given
    kept = []
    for i, part in enumerate(message.content):
        if name := _TEXTS.get(part.type):
            text: str | None = getattr(part, name)
            if text is None and name in given["content"][i]:
                text = ""
            if text is None:
                missing = f"{where}[{i}].{name}"
                raise BadRequest(f"{missing} is required", param=missing)
            kept.append({**given["content"][i], "type": "text", "text": text})
        elif message.role not in ("assistant", "tool"):
            raise BadRequest(f"content of type {part.type!r} is not supported", param=where)
        else:
            left_out.append(f"{where}[{i}].{part.type}")
            if message.role == "tool":  # the model should know that there was something
                kept.append({"type": "text", "text": f"[{part.type}]"})
    return {**given, "content": kept}


def _without_billing(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the line that Claude Code puts before its system prompt.

    It is different in each request, and would keep the prompt from being found in the cache.
    """
    kept = []
    for message in messages:
        content = message.get("content")
        if message["role"] in ("system", "developer") and isinstance(content, str):
            head, _, rest = content.lstrip().partition("\n")
            if head.lower().startswith(_BILLING):
                if not rest:
                    continue
                message = {**message, "content": rest}
        kept.append(message)
    return kept


async def encode_messages(
    llm: Model,
    messages: list[dict[str, Any]],
    body: TemplateFields,
    *,
    reservation: Reservation | None = None,
    reasoning_effort: str | dict[str, Any] | None = None,
    any_length: bool = False,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        reservation, any_length: see ``AsyncLLM.encode_chat``.
        reasoning_effort: one of ``EFFORTS``, for the template, or an object that has it as
            ``effort``; None and "default" leave it out.

    Raises:
        QueueFull: a prompt of this length cannot join the queue now.
        BadRequest: there are no messages, the effort is malformed, or there is no chat template, or
            it fails.
    """
    if llm.chat_template is None:
        raise BadRequest("the model has no chat template", param="messages")
    messages = _without_billing(messages)
    if not messages:
        raise BadRequest("messages is empty", param="messages")
    options = body.chat_template_kwargs or {}
    if taken := _RESERVED.intersection(options):
        raise BadRequest(
            f"chat_template_kwargs must not contain {min(taken)}", param="chat_template_kwargs"
        )
    resume = bool(body.continue_final_message)
    generate = body.add_generation_prompt
    if isinstance(reasoning_effort, dict):
        reasoning_effort = reasoning_effort.get("effort")
    if reasoning_effort not in _OWN_EFFORT:
        if reasoning_effort not in EFFORTS:
            message = f"reasoning_effort must be one of {', '.join(EFFORTS)}"
            raise BadRequest(message, param="reasoning_effort")
        options = {"reasoning_effort": reasoning_effort, **options}
    return await llm.encode_chat(
        messages,
        reservation,
        tools=None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=not resume if generate is None else generate,
        continue_final_message=resume,
        any_length=any_length,
        **options,
    )
