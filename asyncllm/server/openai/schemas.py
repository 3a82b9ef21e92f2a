"""What clients get: one Struct per answer, also described in ``/openapi.json``.

A field that may be ``UNSET`` is left out unless the request asks for it or there is a value.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from asyncllm.server.http.answer import Answer
from asyncllm.server.trace import Trace


class PromptTokensDetails(Answer, kw_only=True):
    """The prompt's tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer, kw_only=True):
    """The answer's tokens that are reasoning; with a ``prediction``, its tokens that were tried."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Answer, kw_only=True):
    """Tokens; a prompt counts once, even with several answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(Answer, kw_only=True):
    """``bytes`` need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    """A token of the answer, and the likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer, kw_only=True):
    """The tokens of this answer, or of this chunk."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(Answer, kw_only=True):
    """``arguments`` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(Answer, kw_only=True):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(Answer, kw_only=True):
    """``name`` comes once and whole, ``arguments`` piece by piece."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Answer, kw_only=True):
    """A piece of the call ``index``; ``id`` and ``type`` come with the first one."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class AnswerMessage(Answer, kw_only=True):
    """``reasoning`` and ``reasoning_content`` are the same: clients know one or the other.

    A refusal is part of ``content``; OpenAI has it in ``refusal``.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class MessageDelta(Answer, kw_only=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class Choice(Answer, kw_only=True):
    """``stop_reason`` is the stop string, or the id of the stop token."""

    index: int
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """One of ``n`` answers."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]


class ChatChunkChoice(Choice, kw_only=True):
    """What is new of one answer; ``finish_reason`` comes with its last chunk."""

    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None


class PromptLogprob(Answer, kw_only=True):
    """``rank`` 1 is the likeliest token at its place."""

    logprob: float
    rank: int
    decoded_token: str


#: For each token of a prompt but the first, by token id: its own logprob, and likely others.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Answer, kw_only=True):
    """Parallel lists; the first token of an echoed prompt has no logprob, hence null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice, kw_only=True):
    """An answer, or what is new of one; choice ``i * n + j`` is the j-th answer to prompt i."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class _Head(Answer, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    trace: Trace | UnsetType = UNSET


class ChatCompletion(_Head, kw_only=True, tag_field="object", tag="chat.completion"):
    """A whole answer."""

    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(_Head, kw_only=True, tag_field="object", tag="chat.completion.chunk"):
    """One event of a stream; the one with the usage has no choice, and neither has the trace's."""

    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(_Head, kw_only=True, tag_field="object", tag="text_completion"):
    """A whole answer."""

    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Head, kw_only=True, tag_field="object", tag="text_completion"):
    """One event of a stream; the one with the usage has no choice, and neither has the trace's."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Rendered(Answer, kw_only=True):
    """A prompt, as text and as token ids."""

    prompt: str
    token_ids: list[int]
    count: int


class EmbeddingUsage(Answer, kw_only=True):
    """Tokens of all inputs; ``total_tokens`` is the same number."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingData(Answer, kw_only=True, tag_field="object", tag="embedding"):
    """The vector of the input ``index``; in base64 it is of little-endian float32."""

    index: int
    embedding: list[float] | str


class EmbeddingList(Answer, kw_only=True, tag_field="object", tag="list"):
    """The vectors, in the order of the inputs."""

    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage
