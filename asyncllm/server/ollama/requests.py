"""The bodies of Ollama's routes, and the chats that they become.

``None`` means "not given", as in chat requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest
from asyncllm.server.chat.adapter import convert_part
from asyncllm.server.chat.messages import functions
from asyncllm.server.chat.requests import (
    COMPONENTS,
    ChatRequest,
    Count,
    Logprobs,
    NamedSchema,
    ResponseFormat,
    Seed,
    StopStrings,
    Text,
    ToolFunction,
)
from asyncllm.server.http.parse import unsupported
from asyncllm.text.parsing import Formats
from asyncllm.types.params import MinP, Penalty, Temperature, TopK, TopP

#: Seconds, or a duration such as "5m".
KeepAlive = float | str
#: How hard to think, or whether.
Think = bool | Literal["low", "medium", "high", "max"]
#: The form of the answer: JSON, or a JSON Schema; empty for any text.
Format = Literal["", "json"] | dict[str, Any]


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Options for sampling; those from ``num_ctx`` on have no effect."""

    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Text | StopStrings | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    repeat_last_n: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    numa: bool | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None


#: Options that should change an answer and do not, with their neutral values.
WITHOUT_EFFECT: Final[dict[str, tuple[Any, ...]]] = {
    "num_keep": (),
    "repeat_last_n": (-1,),
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "mirostat": (0,),
    "penalize_newline": (),
}


class OllamaFunctionCall(msgspec.Struct):
    """The function and its arguments: an object, or whatever a model has written."""

    name: str | None
    arguments: Any = None
    index: int | None = None
    description: str | None = None


class OllamaToolCall(msgspec.Struct):
    """A call that the model has made."""

    function: OllamaFunctionCall
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message; ``tool_name`` and ``tool_call_id`` identify the call of a tool's result."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(msgspec.Struct):
    """The checked fields of a tool. The chat template gets all fields."""

    function: ToolFunction
    type: Literal["function"] | None = None


AnyOllamaTool = Annotated[
    dict[str, Any], Meta(extra_json_schema={"$ref": f"{COMPONENTS}OllamaTool"})
]


class OllamaBody(msgspec.Struct, kw_only=True):
    """Fields of all routes that compute something."""

    model: str | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaFields(OllamaBody, kw_only=True):
    """Fields of both generating routes, which stream by default."""

    format: Format | None = None
    think: Think | None = None
    stream: bool | None = True
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    """Without messages, the request only loads the model."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=8192)] | None = None
    tools: list[AnyOllamaTool] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """Without a prompt, the request only loads the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Annotated[str, Meta(extra_json_schema={"maxLength": 0})] | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class OllamaEmbedRequest(OllamaBody, kw_only=True):
    """Without an input, the request only loads the model."""

    input: str | list[Text] | None = None
    truncate: bool | None = None
    dimensions: Count | None = None


class OllamaEmbeddingsRequest(OllamaBody, kw_only=True):
    """The older request, for one text."""

    prompt: str | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """``name`` is the older name of ``model``."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


#: From the fields of a chat to this API's names.
NAMES: Final = {
    "prompt": "messages",
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "response_format": "format",
}
_NO_TIME: Final = re.compile(r"0|(?:0+(?:\.0*)?(?:h|m|s|ms|us|µs|ns))+")
_SAME_NAME: Final = tuple(
    name for name in OllamaOptions.__struct_fields__ if name in ChatRequest.__struct_fields__
)


def chat_of(body: OllamaFields, model: str, formats: Formats, left_out: list[str]) -> ChatRequest:
    """The chat, with a trace, from which the reply takes its durations.

    Args:
        formats: in which ``model`` writes reasoning and calls.
        left_out: gets names for tools that are left out.

    Raises:
        BadRequest: a field is malformed, or the model cannot do what it asks for.
    """
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
    if isinstance(body, OllamaChatRequest):
        messages = [_message(message) for message in body.messages or ()]
        tools = _tools(body.tools or [], left_out)
        if tools and formats.tools is None:
            raise BadRequest(f"{model} does not support tools", param="tools")
    else:
        assert isinstance(body, OllamaGenerateRequest)
        messages, tools = _prompted(body), []
    return ChatRequest(
        messages=messages,
        tools=tools or None,
        stream=body.stream is not False,
        response_format=_format(body),
        trace=True,
        **_sampling(body.options or OllamaOptions()),
        **_thinking(body.think, model, formats),
    )


def ineffective(options: OllamaOptions | None, context: int) -> Iterator[str]:
    """Options without effect; ``context`` is the most tokens of prompt and answer together."""
    if options is None:
        return
    for name, harmless in WITHOUT_EFFECT.items():
        value = getattr(options, name)
        if value is not None and value not in harmless:
            yield f"options.{name}"
    if options.num_ctx is not None and options.num_ctx > context:
        yield "options.num_ctx"


def _sampling(options: OllamaOptions) -> dict[str, Any]:
    """The options by the names of chat completions."""
    most, seed = options.num_predict, options.seed
    return {
        **{name: getattr(options, name) for name in _SAME_NAME},
        "repetition_penalty": options.repeat_penalty,
        # Negative numbers ask for as many tokens as fit, and for any seed.
        "max_tokens": most if most is not None and most > 0 else None,
        "seed": None if seed == -1 else seed,
    }


def unloads(body: OllamaFields) -> bool:
    """Whether the model is to be kept for no time, in whichever unit."""
    kept = body.keep_alive
    return _NO_TIME.fullmatch(kept) is not None if isinstance(kept, str) else kept == 0


def _format(body: OllamaFields) -> ResponseFormat | None:
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
    return {"chat_template_kwargs": {"enable_thinking": bool(think)}, "reasoning_effort": effort}


def _prompted(body: OllamaGenerateRequest) -> list[dict[str, Any]]:
    if body.raw and (body.system or body.template or body.context):
        raise BadRequest("raw mode does not support template, system, or context", param="raw")
    for name in ("images", "template", "context"):
        if getattr(body, name):
            raise unsupported(name)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt or ""}]


def _message(given: OllamaMessage) -> dict[str, Any]:
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
        convert_part(tool, OllamaTool, f"tools[{i}]")
    return [{**tool, "type": "function"} for tool in tools]
