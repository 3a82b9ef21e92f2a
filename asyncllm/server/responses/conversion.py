"""From a request for a response to the chat that it comes down to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import ChatRequest, GeneratingFields, NamedSchema, ResponseFormat
from asyncllm.server.http.fields import unsupported
from asyncllm.server.http.parse import invalid
from asyncllm.server.responses.input import messages_of
from asyncllm.server.responses.requests import FunctionTool, ResponsesRequest, TextFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.responses.input import Item

#: What clients call the fields of the chat.
NAMES: Final = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
#: Fields that are refused when they ask for something.
_REFUSED: Final = ("conversation", "prompt", "context_management", "return_token_ids")
WITH_LOGPROBS: Final = "message.output_text.logprobs"


def check(asked: ResponsesRequest) -> None:
    """What cannot be seen from one field alone.

    Raises:
        BadRequest: fields contradict each other, or ask for what there is not.
    """
    for name in _REFUSED:
        if getattr(asked, name):
            raise unsupported(name)
    if asked.background and asked.store is False:
        raise BadRequest("background needs store", param="background")
    if asked.background and asked.trace:
        raise BadRequest("trace is not given of what runs in the background", param="trace")
    if asked.top_logprobs and WITH_LOGPROBS not in (asked.include or ()):
        raise BadRequest(f"top_logprobs needs include: {WITH_LOGPROBS}", param="top_logprobs")
    form = text_format(asked)
    if form.type == "json_schema" and (form.schema is None or form.name is None):
        missing = "name" if form.name is None else "schema"
        raise BadRequest(f"text.format.{missing} is required", param=f"text.format.{missing}")


def text_format(asked: ResponsesRequest) -> TextFormat:
    return (asked.text and asked.text.format) or TextFormat("text")


def ineffective(asked: ResponsesRequest) -> list[str]:
    """What was asked for and has no effect."""
    names = []
    if set(asked.include or ()) - {WITH_LOGPROBS}:
        names.append("include")
    if asked.text is not None and asked.text.verbosity is not None:
        names.append("text.verbosity")
    summaries = ("summary", "generate_summary")
    given = [name for name in summaries if getattr(asked.reasoning, name, None) is not None]
    return names + [f"reasoning.{name}" for name in given]


def chat_of(asked: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """The chat that continues ``items``.

    Raises:
        BadRequest: the tools, or the choice of them, are not what OpenAI makes them.
    """
    tools = _tools(asked.tools or ())
    choice, allowed = _tool_choice(asked.tool_choice, [tool.name for tool in tools])
    messages = messages_of(items)
    if asked.instructions is not None:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    shared = {name: getattr(asked, name) for name in GeneratingFields.__struct_fields__}
    shared["max_tokens"] = asked.max_output_tokens or asked.max_tokens
    shared["response_format"] = _response_format(asked)
    return ChatRequest(
        **shared,
        messages=messages,
        tools=[_chat_tool(tool) for tool in tools if tool.name in allowed] or None,
        tool_choice=choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
        chat_template_kwargs=asked.chat_template_kwargs,
    )


def _tools(given: Sequence[dict[str, Any]]) -> list[FunctionTool]:
    tools = []
    for i, tool in enumerate(given):
        if (kind := tool.get("type", "function")) != "function":
            raise BadRequest(f"tools of type {kind!r} are not supported", param=f"tools[{i}].type")
        try:
            tools.append(msgspec.convert(tool, FunctionTool))
        except msgspec.ValidationError as error:
            problem = invalid(error)
            where = f"tools[{i}].{problem.param}" if problem.param else f"tools[{i}]"
            raise BadRequest(f"tools[{i}]: {problem.message}", param=where) from None
    return tools


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    fields = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    function = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


def _tool_choice(given: Any, names: list[str]) -> tuple[Any, list[str]]:
    """OpenAI's choice as chat completions have it, and the tools that are offered at all."""
    match given:
        case None | "none" | "auto":
            return given, names
        case "required" if names:
            return given, names
        case {"type": "function", "name": str(name)} if name in names:
            return {"type": "function", "function": {"name": name}}, names
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            allowed = [_allowed_name(tool, names) for tool in tools]
            if allowed:
                return mode, allowed
    raise BadRequest("tool_choice is none that these tools leave", param="tool_choice")


def _allowed_name(tool: Any, names: list[str]) -> str:
    match tool:
        case {"type": "function", "name": str(name)} if name in names:
            return name
    raise BadRequest("tool_choice allows a tool that is not given", param="tool_choice")


def _response_format(asked: ResponsesRequest) -> ResponseFormat | None:
    """``text.format`` as chat completions have it."""
    form = text_format(asked)
    match form.type:
        case "text":
            return asked.response_format
        case "json_object":
            return ResponseFormat("json_object")
        case "json_schema":
            return ResponseFormat("json_schema", NamedSchema(form.name, form.schema))


def logprobs_of(asked: ResponsesRequest) -> int | None:
    return (asked.top_logprobs or 0) if WITH_LOGPROBS in (asked.include or ()) else None
