"""From a request for a response to a chat, and to the response before it is generated."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.arrivals.names import new_id
from asyncllm.server.chat.adapter import convert_part, function_tool, generating_fields
from asyncllm.server.chat.requests import ChatRequest, NamedSchema, ResponseFormat
from asyncllm.server.http.fields import unsupported
from asyncllm.server.responses.input import messages_of
from asyncllm.server.responses.requests import FunctionTool, ResponsesRequest, TextFormat
from asyncllm.server.responses.schemas import ReasoningEcho, Response, TextEcho

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.responses.schemas import Item
    from asyncllm.types import SamplingParams

#: From the fields of a chat to this API's names.
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


def check(body: ResponsesRequest) -> None:
    """
    Raises:
        BadRequest: fields contradict each other or ask for what is not supported.
    """
    for name in _REFUSED:
        if getattr(body, name):
            raise unsupported(name)
    if body.background and body.store is False:
        raise BadRequest("background needs store", param="background")
    if body.background and body.trace:
        raise BadRequest("trace is not given of what runs in the background", param="trace")
    if body.top_logprobs and WITH_LOGPROBS not in (body.include or ()):
        raise BadRequest(f"top_logprobs needs include: {WITH_LOGPROBS}", param="top_logprobs")
    form = text_format(body)
    if form.type == "json_schema" and (form.schema is None or form.name is None):
        missing = "name" if form.name is None else "schema"
        raise BadRequest(f"text.format.{missing} is required", param=f"text.format.{missing}")


def text_format(body: ResponsesRequest) -> TextFormat:
    return (body.text and body.text.format) or TextFormat("text")


def ineffective(body: ResponsesRequest) -> list[str]:
    """Fields that were given and have no effect."""
    names = []
    if set(body.include or ()) - {WITH_LOGPROBS}:
        names.append("include")
    if body.text is not None and body.text.verbosity is not None:
        names.append("text.verbosity")
    summaries = ("summary", "generate_summary")
    given = [name for name in summaries if getattr(body.reasoning, name, None) is not None]
    return names + [f"reasoning.{name}" for name in given]


def chat_of(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """The chat that continues ``items``.

    Raises:
        BadRequest: a tool or the tool choice is malformed.
    """
    tools = _tools(body.tools or ())
    choice, allowed = _tool_choice(body.tool_choice, [tool.name for tool in tools])
    messages = messages_of(items)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    shared = generating_fields(body)
    shared["max_tokens"] = body.max_output_tokens or body.max_tokens
    shared["response_format"] = _response_format(body)
    return ChatRequest(
        **shared,
        messages=messages,
        tools=[_chat_tool(tool) for tool in tools if tool.name in allowed] or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _tools(given: Sequence[dict[str, Any]]) -> list[FunctionTool]:
    tools = []
    for i, tool in enumerate(given):
        if (kind := tool.get("type", "function")) != "function":
            raise BadRequest(f"tools of type {kind!r} are not supported", param=f"tools[{i}].type")
        tools.append(convert_part(tool, FunctionTool, f"tools[{i}]"))
    return tools


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return function_tool(**{name: getattr(tool, name) for name in names})


def _tool_choice(given: Any, names: list[str]) -> tuple[Any, list[str]]:
    """The choice as chat completions take it, and the names of the tools on offer."""
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


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    """``text.format`` as chat completions take it."""
    form = text_format(body)
    match form.type:
        case "text":
            return body.response_format
        case "json_object":
            return ResponseFormat("json_object")
        case "json_schema":
            return ResponseFormat("json_schema", NamedSchema(form.name, form.schema))


def logprobs_of(body: ResponsesRequest) -> int | None:
    return (body.top_logprobs or 0) if WITH_LOGPROBS in (body.include or ()) else None


def response_of(
    body: ResponsesRequest,
    chat: ChatRequest,
    params: SamplingParams,
    model: str,
    replica: int | None = None,
) -> Response:
    """The response before it is generated; of one of several replicas, its id names it."""
    return Response(
        id=f"resp_{new_id(replica)}",
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        completed_at=None,
        error=None,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=chat.max_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(effort=chat.reasoning_effort, summary=None),
        safety_identifier=body.safety_identifier,
        service_tier="default",
        store=body.store is not False,
        temperature=params.temperature,
        text=TextEcho(format=msgspec.to_builtins(text_format(body))),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        usage=None,
        user=body.user,
    )
