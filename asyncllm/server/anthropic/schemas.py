"""What clients of /v1/messages get: one Struct per answer, event and content block."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, UnsetType

from asyncllm.server.http.answer import Answer
from asyncllm.server.trace import Trace

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
]


class AnthropicErrorDetail(Answer, kw_only=True):
    """``type`` is for programs, ``message`` for people."""

    type: str
    message: str


class AnthropicError(Answer, kw_only=True, tag_field="type", tag="error"):
    """Every answer with a status of 400 or above, and the last event of a stream that failed."""

    error: AnthropicErrorDetail
    request_id: str


class TextContent(Answer, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingContent(Answer, kw_only=True, tag_field="type", tag="thinking"):
    """The model's reasoning."""

    thinking: str
    signature: str


class ToolUseContent(Answer, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model asks for; ``input`` is empty if it was cut off."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class ThinkingDetails(Answer, kw_only=True):
    """The output's tokens that are reasoning."""

    thinking_tokens: int


class AnthropicUsage(Answer, kw_only=True):
    """``input_tokens`` does not include the tokens that were read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails


class Stop(Answer, kw_only=True):
    """Why a message ended; null until then."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class AnthropicMessage(Stop, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: AnthropicUsage
    trace: Trace | UnsetType = UNSET


class TextPiece(Answer, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingPiece(Answer, tag_field="type", tag="thinking_delta"):
    """More of the model's reasoning."""

    thinking: str


class SignaturePiece(Answer, tag_field="type", tag="signature_delta"):
    """The end of the model's reasoning."""

    signature: str


class InputPiece(Answer, tag_field="type", tag="input_json_delta"):
    """More of a call's input; the pieces together are JSON."""

    partial_json: str


Piece: TypeAlias = TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class MessageStart(Answer, kw_only=True, tag_field="type", tag="message_start"):
    """The first event; the message is empty."""

    message: AnthropicMessage


class Ping(Answer, kw_only=True, tag_field="type", tag="ping"):
    """Has no meaning."""


class ContentBlockStart(Answer, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins; it is empty."""

    index: int
    content_block: ContentBlock


class ContentBlockDelta(Answer, kw_only=True, tag_field="type", tag="content_block_delta"):
    """More of the last block."""

    index: int
    delta: Piece


class ContentBlockStop(Answer, kw_only=True, tag_field="type", tag="content_block_stop"):
    """The last block is whole."""

    index: int


class MessageEnd(Answer, kw_only=True, tag_field="type", tag="message_delta"):
    """Why the message ended."""

    delta: Stop
    usage: AnthropicUsage
    trace: Trace | UnsetType = UNSET


class StreamEnd(Answer, kw_only=True, tag_field="type", tag="message_stop"):
    """The last event."""


#: One event of a stream.
AnthropicEvent: TypeAlias = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageEnd
    | StreamEnd
)


class TokenCount(Answer, kw_only=True):
    """How many tokens a prompt has."""

    input_tokens: int
