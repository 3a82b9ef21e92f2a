"""Reads the messages and tools of a chat, in OpenAI's format or mixed with those of other APIs.

Clients mix the APIs: a function in the form of one is a function in all of them. Tools of other
types would be run by another server; they are left out, and the rest of the request is answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import ChatMessage, ChatTool
from asyncllm.server.http.parse import invalid

#: Types of parts that are text; some are those of the Responses API.
_TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_OF_RESULTS: Final = ("tool", "function")


class _Chat(msgspec.Struct):
    messages: list[ChatMessage]
    tools: list[ChatTool] | None


class ChatFields(Protocol):
    """What a client sends of a chat."""

    messages: Any
    tools: list[dict[str, Any]] | None
    tool_choice: Any


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
    _allow_tools(body, left_out)
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


def function_tool(**fields: Any) -> dict[str, Any]:
    """A tool as chat completions take it, without the fields that are None."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": given}


def function_of(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """A function as chat completions take it; None if the tool is none, or malformed.

    It may have the form of chat completions, of Responses, or of Messages.
    """
    kind = tool.get("type")
    match tool:
        case {"function": dict()} if kind in (None, "function"):
            return {**tool, "type": "function"}
        case {"name": str(name)} if kind == "function" or (
            kind in (None, "custom") and "input_schema" in tool
        ):
            parameters = tool.get("parameters", tool.get("input_schema"))
            rest = {key: tool.get(key) for key in ("description", "strict")}
            return function_tool(name=name, parameters=parameters, **rest)
    return None


def functions(tools: list[dict[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """The tools that are functions, and those that are malformed, for the checks to follow.

    Args:
        left_out: gets names for the others.
    """
    found = []
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if (function := function_of(tool)) is not None:
            found.append(function)
        elif kind == "function" or not isinstance(kind, str):
            found.append(tool)
        else:
            left_out.append(f"tools[{i}].{kind}")
    return found


def plain_choice(given: Any) -> Any:
    """The choice of a tool as chat completions take it; it may have the form of any API."""
    match given:
        case {"type": "any" | "required"}:
            return "required"
        case {"type": "auto" | "none" as mode}:
            return mode
        case {"type": "tool" | "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return given


def _allow_tools(body: ChatFields, left_out: list[str]) -> None:
    """Replace ``allowed_tools`` by its mode, and drop the tools that it does not allow.

    It may also allow tools that are left out, beside others.

    Raises:
        BadRequest: it allows no tool that is given, or a tool must be called where there is none.
    """
    choice = body.tool_choice = plain_choice(body.tool_choice)
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}} if (
            mode in ("auto", "required") and allowed
        ):
            names = []
            for i, tool in enumerate(allowed):
                kind = tool.get("type") if isinstance(tool, dict) else None
                if isinstance(kind, str) and kind != "function":
                    left_out.append(f"tool_choice.allowed_tools.tools[{i}].{kind}")
                else:
                    names.append(_tool_name(tool))
        case {"type": "allowed_tools"}:
            problem = "allowed_tools needs a mode, auto or required, and at least one of the tools"
            raise BadRequest(f"tool_choice: {problem}", param="tool_choice")
        case _:
            if choice not in (None, "none", "auto") and not body.tools:
                raise BadRequest("tool_choice needs tools", param="tool_choice")
            return
    tools = body.tools or []
    if not names or None in names or not {_tool_name(tool) for tool in tools}.issuperset(names):
        problem = "tool_choice allows a tool that is not given"
        raise BadRequest(problem, param="tool_choice")
    body.tools = [tool for tool in tools if _tool_name(tool) in names]
    body.tool_choice = mode


def _tool_name(tool: Any) -> str | None:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None
