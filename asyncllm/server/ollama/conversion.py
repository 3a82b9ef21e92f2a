"""From requests of Ollama's clients to a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from asyncllm.errors import BadRequest
from asyncllm.server.chat.adapter import convert_part
from asyncllm.server.chat.messages import functions
from asyncllm.server.chat.requests import ChatRequest, NamedSchema, ResponseFormat
from asyncllm.server.http.parse import unsupported
from asyncllm.server.ollama import requests
from asyncllm.server.ollama.requests import Think
from asyncllm.text.parsing import Formats

#: From the fields of a chat to this API's names.
NAMES: Final = {
    "prompt": "messages",
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "response_format": "format",
}
_NO_TIME: Final = re.compile(r"0|(?:0+(?:\.0*)?(?:h|m|s|ms|us|µs|ns))+")
_SAME_NAME: Final = tuple(
    name
    for name in requests.OllamaOptions.__struct_fields__
    if name in ChatRequest.__struct_fields__
)


def chat_of(
    body: requests.OllamaFields, model: str, formats: Formats, left_out: list[str]
) -> ChatRequest:
    """The chat, with a trace, from which the reply takes its durations.

    Args:
        formats: in which ``model`` writes reasoning and calls.
        left_out: gets names for tools that are left out.

    Raises:
        BadRequest: a field is malformed, or the model cannot do what it asks for.
    """
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
    if isinstance(body, requests.OllamaChatRequest):
        messages = [_message(message) for message in body.messages or ()]
        tools = _tools(body.tools or [], left_out)
        if tools and formats.tools is None:
            raise BadRequest(f"{model} does not support tools", param="tools")
    else:
        assert isinstance(body, requests.OllamaGenerateRequest)
        messages, tools = _prompted(body), []
    return ChatRequest(
        messages=messages,
        tools=tools or None,
        stream=body.stream is not False,
        response_format=_format(body),
        trace=True,
        **_sampling(body.options or requests.OllamaOptions()),
        **_thinking(body.think, model, formats),
    )


def ineffective(options: requests.OllamaOptions | None, context: int) -> Iterator[str]:
    """Options without effect; ``context`` is the most tokens of prompt and answer together."""
    if options is None:
        return
    for name, harmless in requests.WITHOUT_EFFECT.items():
        value = getattr(options, name)
        if value is not None and value not in harmless:
            yield f"options.{name}"
    if options.num_ctx is not None and options.num_ctx > context:
        yield "options.num_ctx"


def _sampling(options: requests.OllamaOptions) -> dict[str, Any]:
    """The options by the names of chat completions."""
    most, seed = options.num_predict, options.seed
    return {
        **{name: getattr(options, name) for name in _SAME_NAME},
        "repetition_penalty": options.repeat_penalty,
        # Negative numbers ask for as many tokens as fit, and for any seed.
        "max_tokens": most if most is not None and most > 0 else None,
        "seed": None if seed == -1 else seed,
    }


def unloads(body: requests.OllamaFields) -> bool:
    """Whether the model is to be kept for no time, in whichever unit."""
    kept = body.keep_alive
    return _NO_TIME.fullmatch(kept) is not None if isinstance(kept, str) else kept == 0


def _format(body: requests.OllamaFields) -> ResponseFormat | None:
    if isinstance(body.format, dict):
        return ResponseFormat("json_schema", NamedSchema(schema=body.format))
    return ResponseFormat("json_object") if body.format else None


def _thinking(think: Think | None, model: str, formats: Formats) -> dict[str, Any]:
    """``enable_thinking`` is the name that most chat templates have for the switch."""
    if think is None:
        return {}
    if think and formats.reasoning is None:
        raise BadRequest(f"{model} does not support thinking", param="think")
    effort = think if isinstance(think, str) else None
    return {
        "chat_template_kwargs": {"enable_thinking": bool(think)},
        "reasoning_effort": effort,
    }


def _prompted(body: requests.OllamaGenerateRequest) -> list[dict[str, Any]]:
    if body.raw and (body.system or body.template or body.context):
        raise BadRequest("raw mode does not support template, system, or context", param="raw")
    for name in ("images", "template", "context"):
        if getattr(body, name):
            raise unsupported(name)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt or ""}]


def _message(given: requests.OllamaMessage) -> dict[str, Any]:
    """The message as chat completions take it."""
    if given.images:
        raise unsupported("images")
    message: dict[str, Any] = {"role": given.role, "content": given.content or ""}
    if given.thinking:
        message["reasoning_content"] = given.thinking
    if given.tool_calls:
        message["content"] = given.content or None
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
                **({} if call.id is None else {"id": call.id}),
            }
            for call in given.tool_calls
        ]
    if given.tool_name is not None:
        message["name"] = given.tool_name
    if given.tool_call_id is not None:
        message["tool_call_id"] = given.tool_call_id
    return message


def _tools(given: list[dict[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    tools = functions(given, left_out)
    for i, tool in enumerate(tools):
        convert_part(tool, requests.OllamaTool, f"tools[{i}]")
    return [{**tool, "type": "function"} for tool in tools]
