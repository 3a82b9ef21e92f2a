"""From a request for a response to a chat, and to the response before it is generated."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.arrivals.names import Numbers
from asyncllm.server.chat.adapter import generating_fields, tool_call
from asyncllm.server.chat.requests import ChatRequest, NamedSchema, ResponseFormat
from asyncllm.server.http.parse import unsupported
from asyncllm.server.responses import item_schemas as items
from asyncllm.server.responses.item_schemas import unseal
from asyncllm.server.responses.requests import ResponsesRequest, TextFormat
from asyncllm.server.responses.schemas import ReasoningEcho, Response, TextEcho
from asyncllm.server.responses.tools import INPUT, Offers, joined_name, read_choice, shell_arguments
from asyncllm.types import SamplingParams

#: From the fields of a chat to this API's names.
NAMES: Final = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
#: Fields that a response repeats, and those among them that may be anything: it repeats only texts.
_REPEATED: Final = ("instructions", "max_tool_calls", "previous_response_id")
_TEXTS: Final = ("prompt_cache_key", "safety_identifier", "user")
#: Fields that are refused when they ask for something.
_REFUSED: Final = ("conversation", "prompt", "return_token_ids")
WITH_LOGPROBS: Final = "message.output_text.logprobs"
#: Asks for reasoning in a form that clients keep and send back.
WITH_REASONING: Final = "reasoning.encrypted_content"


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
        names.append("include")  # reasoning, too: what clients keep of it is not encrypted
    if body.context_management:
        names.append("context_management")
    if body.text is not None and body.text.verbosity is not None:
        names.append("text.verbosity")
    summaries = ("summary", "generate_summary")
    given = [name for name in summaries if getattr(body.reasoning, name, None) is not None]
    return names + [f"reasoning.{name}" for name in given]


def chat_of(
    body: ResponsesRequest, given: Sequence[items.Item], left_out: list[str]
) -> tuple[ChatRequest, Offers]:
    """The chat that continues some items, and the tools that the model may call.

    Args:
        left_out: gets names for what is left out.

    Raises:
        BadRequest: a tool or the tool choice is malformed.
    """
    offers = Offers(_given_tools(body, given), left_out)
    choice, allowed = read_choice(body.tool_choice, offers, left_out)
    messages = messages_of(given)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    shared = generating_fields(body)
    shared["max_tokens"] = body.max_output_tokens or body.max_tokens
    shared["response_format"] = _response_format(body)
    chat = ChatRequest(
        **shared,
        messages=messages,
        tools=offers.tools(allowed) or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return chat, offers


def _given_tools(
    body: ResponsesRequest, given: Sequence[items.Item]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tools of a request, and those among its items, each with its place."""
    for i, tool in enumerate(body.tools or ()):
        yield f"tools[{i}]", tool
    for item in given:
        if isinstance(item, items.AdditionalToolsItem | items.ToolSearchOutputItem):
            for i, tool in enumerate(item.tools):
                yield f"{item.id}.tools[{i}]", tool


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
    body: ResponsesRequest, chat: ChatRequest, params: SamplingParams, model: str, numbers: Numbers
) -> Response:
    """The response before it is generated; of one of several replicas, its id names it."""
    effort = None if body.reasoning is None else body.reasoning.effort
    repeated: dict[str, Any] = {name: getattr(body, name) for name in _REPEATED}
    for name in _TEXTS:
        given = getattr(body, name)
        repeated[name] = given if isinstance(given, str) else None
    return Response(
        id=f"resp_{numbers.new_id()}",
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        completed_at=None,
        error=None,
        incomplete_details=None,
        max_output_tokens=chat.max_tokens,
        metadata=body.metadata if isinstance(body.metadata, dict) else {},
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=ReasoningEcho(effort=effort, summary=None),
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
        **repeated,
    )


def messages_of(given: Sequence[items.Item]) -> list[dict[str, Any]]:
    """Chat messages; consecutive reasoning, text and calls of the assistant become one message."""
    messages: list[_Message] = []
    for item in given:
        match item:
            case items.MessageItem(role=role):
                last = messages[-1] if messages else None
                # Text joins preceding reasoning and calls.
                if role != "assistant" or not (last and last.takes_text()):
                    messages.append(last := _Message(role))
                last.texts.append(_joined(item.content))
            case items.ReasoningItem():
                thought = _joined(item.content or item.summary)
                messages.append(_Message("assistant", fields={"reasoning_content": thought}))
            case items.CompactionItem():
                summary = unseal(item.encrypted_content) or ""
                told = f"Summary of the conversation before this point:\n\n{summary}"
                messages.append(_Message("user", [told]))
            case items.FunctionCallOutputItem() | items.CustomToolCallOutputItem():
                messages.append(_result(item.call_id, item.output))
            case items.ToolSearchOutputItem():
                messages.append(_result(item.call_id, _found(item.tools)))
            case items.AdditionalToolsItem():
                pass  # among the tools
            case _:
                if not messages or messages[-1].role != "assistant":
                    messages.append(_Message("assistant"))
                calls = messages[-1].fields.setdefault("tool_calls", [])
                calls.append(_call(item))
    return [message.whole() for message in messages]


@dataclass
class _Message:
    """A chat message, collected from items."""

    role: str
    texts: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    def takes_text(self) -> bool:
        """Whether the assistant's next text belongs to it."""
        return self.role == "assistant" and (not self.texts or "tool_calls" in self.fields)

    def whole(self) -> dict[str, Any]:
        only_calls = not self.texts and "tool_calls" in self.fields
        content = None if only_calls else "".join(self.texts)
        return {"role": self.role, "content": content, **self.fields}


def _call(item: items.CallItem) -> dict[str, Any]:
    match item:
        case items.FunctionCallItem(name=name, arguments=arguments):
            name = joined_name(name, item.namespace or None)
        case items.CustomToolCallItem(name=name):
            name = joined_name(name, item.namespace or None)
            arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
        case items.LocalShellCallItem():
            name, arguments = "local_shell", shell_arguments(item.action)
        case items.ToolSearchCallItem():
            name, arguments = "tool_search", item.arguments
    return tool_call(item.call_id, name, arguments)


def _result(call_id: str, text: str) -> _Message:
    return _Message("tool", [text], {"tool_call_id": call_id} if call_id else {})


def _found(tools: Sequence[dict[str, Any]]) -> str:
    """The result of a search for tools: their names, as their definitions are among the tools."""
    names = []
    for tool in tools:
        space = tool.get("name") if tool.get("type") == "namespace" else None
        inner = tool.get("tools", ()) if space else (tool,)
        names += [joined_name(str(each.get("name")), space) for each in inner]
    return f"Found: {', '.join(names)}" if names else "Found no tools"


def _joined(parts: Sequence[items.Part]) -> str:
    return "\n".join(part.text for part in parts)
