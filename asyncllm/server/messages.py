"""Chat messages and tools as OpenAI defines them: checked here, rendered by the chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.body import invalid
from asyncllm.server.protocol import ChatMessage, ChatTool

if TYPE_CHECKING:
    from asyncllm.api import AsyncLLM

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


async def encode_messages(
    llm: AsyncLLM,
    messages: list[dict[str, Any]],
    asked: TemplateFields,
    *,
    tenant: str | None = None,
    reasoning_effort: str | None = None,
    any_length: bool = False,
) -> list[int]:
    """Token ids of a conversation; ``tenant`` and ``any_length`` as in ``AsyncLLM.encode_chat``.

    ``reasoning_effort`` is for the template, which is told nothing when it is None.

    Raises:
        QueueFull: a request of the tenant's cannot join the queue now.
        BadRequest: a message or a tool has not the shape that OpenAI gives it, or the model has no
            chat template, or the template refuses.
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
        options = {"reasoning_effort": reasoning_effort, **options}
    return await llm.encode_chat(
        messages,
        tenant,
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
