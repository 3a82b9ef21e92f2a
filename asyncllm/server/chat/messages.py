"""Chat messages and tools as OpenAI defines them: checked here, rendered by the chat template."""

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


#: How hard a model may be asked to think; templates know some of them.
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class _Chat(msgspec.Struct):
    messages: list[ChatMessage]
    tools: list[ChatTool] | None


class TemplateFields(Protocol):
    """How messages become a prompt, in whichever request they came."""

    tools: list[dict[str, Any]] | None
    tool_choice: Any
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def allow_tools(asked: TemplateFields) -> None:
    """Have OpenAI's ``allowed_tools`` mean what its mode says, with no other tools.

    The model is not even told of these, so it cannot call them.

    Raises:
        BadRequest: it has not that shape, or allows a tool that is not given, or none.
    """
    match asked.tool_choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}} if (
            mode in ("auto", "required") and allowed
        ):
            names = [_tool_name(tool) for tool in allowed]
        case {"type": "allowed_tools"}:
            problem = "allowed_tools needs a mode, auto or required, and at least one of the tools"
            raise BadRequest(f"tool_choice: {problem}", param="tool_choice")
        case _:
            return
    tools = asked.tools or []
    if None in names or not {_tool_name(tool) for tool in tools}.issuperset(names):
        problem = "tool_choice allows a tool that is not given"
        raise BadRequest(problem, param="tool_choice")
    asked.tools = [tool for tool in tools if _tool_name(tool) in names]
    asked.tool_choice = mode


def _tool_name(tool: Any) -> str | None:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


async def encode_messages(
    llm: Model,
    messages: list[dict[str, Any]],
    asked: TemplateFields,
    *,
    reservation: Reservation | None = None,
    reasoning_effort: str | None = None,
    any_length: bool = False,
) -> list[int]:
    """Token ids of a conversation.

    ``reservation`` and ``any_length`` are as in ``AsyncLLM.encode_chat``.

    ``reasoning_effort``, one of ``EFFORTS``, is for the template, which is told nothing when it is
    None.

    Raises:
        QueueFull: a prompt of this length cannot join the queue now.
        BadRequest: a message or a tool has not the shape that OpenAI gives it, or the effort is
            none that there is, or the model has no chat template, or the template refuses.
    """
    if llm.chat_template is None:
        raise BadRequest("the model has no chat template", param="messages")
    _check(messages, asked.tools)
    options = asked.chat_template_kwargs or {}
    if taken := _RESERVED.intersection(options):
        raise BadRequest(
            f"chat_template_kwargs must not contain {min(taken)}", param="chat_template_kwargs"
        )
    resume = bool(asked.continue_final_message)
    generate = asked.add_generation_prompt
    if reasoning_effort is not None:
        if reasoning_effort not in EFFORTS:
            message = f"reasoning_effort must be one of {', '.join(EFFORTS)}"
            raise BadRequest(message, param="reasoning_effort")
        options = {"reasoning_effort": reasoning_effort, **options}
    return await llm.encode_chat(
        messages,
        reservation,
        tools=None if asked.tool_choice == "none" else asked.tools,
        add_generation_prompt=not resume if generate is None else generate,
        continue_final_message=resume,
        any_length=any_length,
        **options,
    )


def _check(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
    try:
        chat = msgspec.convert({"messages": messages, "tools": tools}, type=_Chat)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
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
