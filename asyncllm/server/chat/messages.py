"""Checks chat messages and tools in OpenAI's format, and has the chat template render them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import ChatMessage, ChatTool
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


class _Chat(msgspec.Struct):
    messages: list[ChatMessage]
    tools: list[ChatTool] | None


class TemplateFields(Protocol):
    """The fields of a request that decide how messages become a prompt."""

    tools: list[dict[str, Any]] | None
    tool_choice: Any
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def allow_tools(body: TemplateFields) -> None:
    """Replace OpenAI's ``allowed_tools`` by its mode, and drop the tools that it does not allow.

    The model does not see the dropped tools, so it cannot call them.

    Raises:
        BadRequest: ``allowed_tools`` is malformed, empty, or names a tool that is not given.
    """
    match body.tool_choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}} if (
            mode in ("auto", "required") and allowed
        ):
            names = [_tool_name(tool) for tool in allowed]
        case {"type": "allowed_tools"}:
            problem = "allowed_tools needs a mode, auto or required, and at least one of the tools"
            raise BadRequest(f"tool_choice: {problem}", param="tool_choice")
        case _:
            return
    tools = body.tools or []
    if None in names or not {_tool_name(tool) for tool in tools}.issuperset(names):
        problem = "tool_choice allows a tool that is not given"
        raise BadRequest(problem, param="tool_choice")
    body.tools = [tool for tool in tools if _tool_name(tool) in names]
    body.tool_choice = mode


def _tool_name(tool: Any) -> str | None:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


async def encode_messages(
    llm: Model,
    messages: list[dict[str, Any]],
    body: TemplateFields,
    *,
    reservation: Reservation | None = None,
    reasoning_effort: str | None = None,
    any_length: bool = False,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        reservation, any_length: see ``AsyncLLM.encode_chat``.
        reasoning_effort: one of ``EFFORTS``, for the template; None leaves it out.

    Raises:
        QueueFull: a prompt of this length cannot join the queue now.
        BadRequest: a message, a tool or the effort is malformed, or there is no chat template, or
            it refuses the messages.
    """
    if llm.chat_template is None:
        raise BadRequest("the model has no chat template", param="messages")
    _check(messages, body.tools)
    options = body.chat_template_kwargs or {}
    if taken := _RESERVED.intersection(options):
        raise BadRequest(
            f"chat_template_kwargs must not contain {min(taken)}", param="chat_template_kwargs"
        )
    resume = bool(body.continue_final_message)
    generate = body.add_generation_prompt
    if reasoning_effort is not None:
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


def _check(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
    try:
        chat = msgspec.convert({"messages": messages, "tools": tools}, type=_Chat)
    except msgspec.ValidationError as error:
        raise invalid(error, _Chat) from None
    if not messages:
        raise BadRequest("messages is empty", param="messages")
    if tools is not None and not tools:
        raise BadRequest("tools is empty", param="tools")
    for i, message in enumerate(chat.messages):
        _check_content(message, f"messages[{i}].content")


def _check_content(message: ChatMessage, where: str) -> None:
    if message.content is None and message.role != "assistant":
        raise BadRequest(f"{where} is required", param=where)
    if not isinstance(message.content, list):
        return
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise BadRequest(f"content of type {part.type!r} is not supported", param=where)
        if part.text is None:
            raise BadRequest(f"{where}[{i}].text is required", param=f"{where}[{i}].text")
