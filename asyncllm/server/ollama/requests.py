"""The bodies of Ollama's routes; ``None`` means "not given", as in chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from asyncllm.server.chat.requests import (
    COMPONENTS,
    Count,
    Logprobs,
    Seed,
    StopStrings,
    Text,
    ToolFunction,
)
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
