"""From a request for a message to a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from asyncllm.errors import BadRequest
from asyncllm.server.anthropic import requests
from asyncllm.server.anthropic.blocks import read_messages
from asyncllm.server.chat.adapter import convert_part, generating_fields
from asyncllm.server.chat.requests import ChatRequest, ChatTool, NamedSchema, ResponseFormat
from asyncllm.server.chat.tools import function_of, plain_choice
from asyncllm.server.http.fields import unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.anthropic.requests import MessagesRequest

#: From the fields of a chat to this API's names.
NAMES: Final = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
#: Seconds by ``cache_control.ttl``.
_TTLS: Final = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_ONE_CALL: Final = "disable_parallel_tool_use"
#: Fields that ask for what only another server could do: they are left out.
_INEFFECTIVE: Final = ("context_management", "container", "mcp_servers")


def ineffective(body: MessagesRequest) -> list[str]:
    """Fields without effect: reasoning is always shown, for example."""
    names = [name for name in _INEFFECTIVE if getattr(body, name)]
    if body.thinking is not None and body.thinking.display is not None:
        names.insert(0, "thinking.display")
    return names


def cache_ttl(body: MessagesRequest) -> float | None:
    """Seconds for which the longest ``cache_control`` pins the prefix; None without any.

    ``chat_of`` has checked the body.
    """
    parts = list(body.tools or ())
    for message in body.messages:
        if isinstance(message.content, list):
            parts += message.content
    for part in parts:  # which grow
        if part.get("type") == "tool_result" and isinstance(part.get("content"), list):
            parts += [block for block in part["content"] if isinstance(block, dict)]
    marks = [part.get("cache_control") for part in parts]
    ttls = [mark.get("ttl") for mark in marks if isinstance(mark, dict)]
    given = [body, *(() if isinstance(body.system, str) else body.system or ())]
    ttls += [each.cache_control.ttl for each in given if each.cache_control is not None]
    known = [ttl for ttl in ttls if ttl is None or isinstance(ttl, str)]
    return max((_TTLS[ttl] for ttl in known if ttl in _TTLS), default=None)


def chat_of(body: requests.CountTokensRequest, left_out: list[str]) -> ChatRequest:
    """
    Args:
        left_out: gets names for what is left out.

    Raises:
        BadRequest: a message, a tool or the tool choice is malformed or not supported.
    """
    if body.return_token_ids:
        raise unsupported("return_token_ids")
    messages = read_messages(body.system, body.messages, left_out)
    tools = _tools(body.tools or (), left_out)
    shared = generating_fields(body)
    if body.stop_sequences is not None:
        if body.stop is not None:
            raise BadRequest("stop and stop_sequences exclude each other", param="stop")
        shared["stop"] = body.stop_sequences
    config = body.output_config
    form = body.output_format if config is None or config.format is None else config.format
    if form is not None:
        schema = NamedSchema(schema=form.schema)
        shared["response_format"] = ResponseFormat("json_schema", schema)
    one_call = isinstance(choice := body.tool_choice, dict) and choice.get(_ONE_CALL)
    return ChatRequest(
        **shared,
        messages=messages,
        tools=tools or None,
        tool_choice=_tool_choice(body, [tool["function"]["name"] for tool in tools]),
        parallel_tool_calls=not one_call,
        continue_final_message=_continues(messages),
        reasoning_effort=None if config is None else config.effort,
        **_thinking(body),
    )


def _thinking(body: requests.CountTokensRequest) -> dict[str, Any]:
    """``enable_thinking`` is the name that most chat templates have for the switch."""
    options = body.chat_template_kwargs
    thinking = body.thinking
    if thinking is None or thinking.type in ("adaptive", "between_tools"):
        return {"chat_template_kwargs": options}
    enabled = thinking.type == "enabled"
    if enabled and thinking.budget_tokens is None:
        where = "thinking.budget_tokens"
        raise BadRequest(f"{where} is required", param=where)
    return {
        "chat_template_kwargs": {"enable_thinking": enabled, **(options or {})},
        "thinking_token_budget": thinking.budget_tokens if enabled else None,
    }


def _continues(messages: Sequence[dict[str, Any]]) -> bool | None:
    """Whether the answer continues the last message.

    Raises:
        BadRequest: the last message ends with calls, whose results are missing.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return None
    if "tool_calls" in last or last["content"] is None:
        raise BadRequest("the last message must end with text or a tool_result", param="messages")
    return True


def _tools(given: Sequence[dict[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """The client's own tools. Those of Anthropic's, which have a type and no schema, are left out.

    Raises:
        BadRequest: a tool is malformed.
    """
    tools = []
    for i, each in enumerate(given):
        kind, where = each.get("type"), f"tools[{i}]"
        tool = function_of(each)
        if kind in (None, "custom") and "function" not in each:
            convert_part(each, requests.ClientTool, where)
        elif tool is None and kind != "function":
            left_out.append(f"{where}.{kind}")
        else:
            convert_part(tool or each, ChatTool, where)
        tools += [tool] if tool is not None else []
    return tools


def _tool_choice(body: requests.CountTokensRequest, names: Sequence[str]) -> Any:
    """The choice as chat completions take it."""
    choice = plain_choice(body.tool_choice)
    if choice in (None, "auto", "none"):
        return choice
    if not names:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    match choice:
        case "required":
            return choice
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise BadRequest("tool_choice: there is no such tool", param="tool_choice.name")
            return choice
    raise BadRequest("tool_choice must have the type auto, any, tool or none", param="tool_choice")
