"""What clients of Ollama's routes get: one Struct per answer."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, UnsetType

from asyncllm.server.http.answer import Answer
from asyncllm.server.openai.schemas import TokenLogprob


class OllamaError(Answer, kw_only=True):
    """Every answer with a status of 400 or above, and the last line of a stream that failed."""

    error: str


class OllamaFunction(Answer, kw_only=True):
    """``index`` counts the calls of a message."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Answer, kw_only=True):
    """A call that the model asks for; it comes as a whole, in a stream too."""

    id: str
    function: OllamaFunction


class OllamaAnswerMessage(Answer, kw_only=True):
    """A message, or the part of it in one line."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(Answer, kw_only=True):
    """A whole answer, or one line of a stream; the last line says why it ends, and the counters.

    Durations are in nanoseconds. ``load_duration`` is the time before the prompt was begun.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "abort", "load", "unload"] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChat(OllamaAnswer, kw_only=True):
    """The answer to a chat."""

    message: OllamaAnswerMessage


class OllamaGenerated(OllamaAnswer, kw_only=True):
    """The answer to a prompt."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedded(Answer, kw_only=True):
    """A vector for each input. Durations are in nanoseconds, as in ``OllamaAnswer``."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Answer, kw_only=True):
    """The vector of the prompt; empty without one."""

    embedding: list[float]


class OllamaDetails(Answer, kw_only=True):
    """``quantization_level`` is the format of the weights, or the data type of computations."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _Model(Answer, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(_Model, kw_only=True):
    """A served model; ``digest`` is of its name, and the size is not known."""

    modified_at: str


class OllamaRunning(_Model, kw_only=True):
    """A served model, which stays loaded."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaTags(Answer, kw_only=True):
    """All names of served models."""

    models: list[OllamaModel]


class OllamaProcesses(Answer, kw_only=True):
    """Every model that is loaded."""

    models: list[OllamaRunning]


Capability: TypeAlias = Literal["completion", "tools", "thinking"]


class OllamaShown(Answer, kw_only=True):
    """``parameters`` are the sampling defaults, one in each line."""

    modified_at: str
    parameters: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]


class OllamaVersion(Answer, kw_only=True):
    """The version of Ollama whose API this is; clients decide by it what to send."""

    version: str
