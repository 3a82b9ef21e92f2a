"""From what Ollama's clients ask to the chat, or the plain text, that it comes down to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import ChatRequest, NamedSchema, ResponseFormat
from asyncllm.server.http.fields import unsupported
from asyncllm.server.http.parse import invalid
from asyncllm.server.ollama.requests import (
    WITHOUT_EFFECT,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaTool,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncllm.server.ollama.requests import Think
    from asyncllm.text.parsing import Formats

#: What clients call the fields of the chat.
NAMES: Final = {
    "prompt": "messages",
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "response_format": "format",
}
_NO_TIME: Final = re.compile(r"0|(?:0+(?:\.0*)?(?:h|m|s|ms|us|µs|ns))+")
_SAME_NAME: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "stop",
    "presence_penalty",
    "frequency_penalty",
)


def chat_of(asked: OllamaFields, model: str, formats: Formats) -> ChatRequest:
    """The chat whose next message is wanted, with a trace: it has the durations.

    Args:
        formats: what ``model`` can write.

    Raises:
        BadRequest: it asks for what is malformed, or what the model cannot do.
    """
    if asked.top_logprobs is not None and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
    if isinstance(asked, OllamaChatRequest):
        messages = [_message(message) for message in asked.messages or ()]
        tools = _tools(asked.tools or ())
        if tools and formats.tools is None:
            raise BadRequest(f"{model} does not support tools", param="tools")
    else:
        assert isinstance(asked, OllamaGenerateRequest)
        messages, tools = _prompted(asked), []
    return ChatRequest(
        messages=messages,
        tools=tools or None,
        stream=asked.stream is not False,
        response_format=_format(asked),
        trace=True,
        **_sampling(asked.options or OllamaOptions()),
        **_thinking(asked.think, model, formats),
    )


def ineffective(options: OllamaOptions | None, context: int) -> Iterator[str]:
    """What they ask for and do not get; ``context`` is how many tokens there may be."""
    if options is None:
        return
    for name, harmless in WITHOUT_EFFECT.items():
        value = getattr(options, name)
        if value is not None and value not in harmless:
            yield f"options.{name}"
    if options.num_ctx is not None and options.num_ctx > context:
        yield "options.num_ctx"


def _sampling(options: OllamaOptions) -> dict[str, Any]:
    """The options that count, by OpenAI's names."""
    most, seed = options.num_predict, options.seed
    return {
        **{name: getattr(options, name) for name in _SAME_NAME},
        "repetition_penalty": options.repeat_penalty,
        # As much as there is room for, and any seed: both are what a negative number says.
        "max_tokens": most if most is not None and most > 0 else None,
        "seed": None if seed == -1 else seed,
    }


def unloads(asked: OllamaFields) -> bool:
    """Whether the model is to be kept no longer: for zero seconds, hours, or whatever."""
    kept = asked.keep_alive
    return _NO_TIME.fullmatch(kept) is not None if isinstance(kept, str) else kept == 0


def _format(asked: OllamaFields) -> ResponseFormat | None:
    if isinstance(asked.format, dict):
        return ResponseFormat("json_schema", NamedSchema(schema=asked.format))
    return ResponseFormat("json_object") if asked.format else None


def _thinking(think: Think | None, model: str, formats: Formats) -> dict[str, Any]:
    """Whether to think is for the template to know, by the name that most of them have for it."""
    if think is None:
        return {}
    if think and formats.reasoning is None:
        raise BadRequest(f"{model} does not support thinking", param="think")
    effort = think if isinstance(think, str) else None
    return {
        "chat_template_kwargs": {"enable_thinking": bool(think)},
        "reasoning_effort": effort,
    }


def _prompted(asked: OllamaGenerateRequest) -> list[dict[str, Any]]:
    if asked.raw and (asked.system or asked.template or asked.context):
        raise BadRequest("raw mode does not support template, system, or context", param="raw")
    for name in ("images", "template", "context"):
        if getattr(asked, name):
            raise unsupported(name)
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    return [*system, {"role": "user", "content": asked.prompt or ""}]


def _message(given: OllamaMessage) -> dict[str, Any]:
    """The same in OpenAI's words."""
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


def _tools(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    for i, tool in enumerate(given):
        try:
            msgspec.convert(tool, OllamaTool)
        except msgspec.ValidationError as error:
            problem = invalid(error)
            raise BadRequest(f"tools[{i}]: {problem.message}", param=f"tools[{i}]") from None
    return [{**tool, "type": "function"} for tool in given]
