"""What clients of /v1/responses get: one Struct per answer and event."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from msgspec import UNSET, UnsetType

from asyncllm.server.http.answer import Answer
from asyncllm.server.openai.schemas import TokenLogprob
from asyncllm.server.responses.item_schemas import (
    CompactionItem,
    Item,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningText,
)
from asyncllm.server.responses.item_schemas import ReasoningItem as ReasoningItem
from asyncllm.server.trace import Trace

Status: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "cancelled", "failed"
]
FailureCode: TypeAlias = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
#: By the HTTP status of the error.
FAILURE_CODES: Final[dict[int, FailureCode]] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class InputTokensDetails(Answer, kw_only=True):
    """The input's tokens that were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer, kw_only=True):
    """The output's tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer, kw_only=True):
    """Tokens of the input and of the output."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Answer, kw_only=True):
    """Why a response failed."""

    code: FailureCode
    message: str


class IncompleteDetails(Answer, kw_only=True):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ReasoningEcho(Answer, kw_only=True):
    """The request's options for reasoning."""

    effort: str | None
    summary: None


class TextEcho(Answer, kw_only=True):
    """The request's options for text."""

    format: dict[str, Any]


class Response(Answer, kw_only=True, tag_field="object", tag="response"):
    """A response, complete or in progress; what is not known yet is null."""

    id: str
    created_at: int
    status: Status
    background: bool
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    trace: Trace | UnsetType = UNSET


class NumberedEvent(Answer, kw_only=True, tag_field="type"):
    """What all events have; events are numbered from 0."""

    sequence_number: int


class StreamError(NumberedEvent, kw_only=True, tag="error"):
    """The stream ends; of the response, no more is known. It has no place among the numbers."""

    message: str
    code: str = "server_error"
    param: None = None


class LifecycleEvent(NumberedEvent, kw_only=True):
    response: Response


class _ItemEvent(NumberedEvent, kw_only=True):
    output_index: int
    item: OutputItem


class _DeltaEvent(NumberedEvent, kw_only=True):
    output_index: int
    item_id: str


class _PartEvent(_DeltaEvent, kw_only=True):
    content_index: int


class ResponseCreated(LifecycleEvent, tag="response.created"):
    """The first event."""


class ResponseQueued(LifecycleEvent, tag="response.queued"):
    """The response waits, in the background."""


class ResponseInProgress(LifecycleEvent, tag="response.in_progress"):
    """The response is being generated."""


class ResponseCompleted(LifecycleEvent, tag="response.completed"):
    """The last event, when all went well."""


class ResponseIncomplete(LifecycleEvent, tag="response.incomplete"):
    """The last event, when the answer was cut off or cancelled."""


class ResponseFailed(LifecycleEvent, tag="response.failed"):
    """The last event, when it went wrong."""


class OutputItemAdded(_ItemEvent, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_ItemEvent, tag="response.output_item.done"):
    """An item is whole."""


class ContentPartAdded(_PartEvent, kw_only=True, tag="response.content_part.added"):
    """The text of an item begins."""

    part: OutputText | ReasoningText


class ContentPartDone(_PartEvent, kw_only=True, tag="response.content_part.done"):
    """The text of an item is whole."""

    part: OutputText | ReasoningText


class TextDelta(_PartEvent, kw_only=True, tag="response.output_text.delta"):
    """More of a message."""

    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_PartEvent, kw_only=True, tag="response.output_text.done"):
    """All of a message."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_PartEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """More of the model's reasoning."""

    delta: str


class ReasoningDone(_PartEvent, kw_only=True, tag="response.reasoning_text.done"):
    """All of the model's reasoning."""

    text: str


class ArgumentsDelta(_DeltaEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_DeltaEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    name: str
    arguments: str


class CustomInputDelta(_DeltaEvent, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of the text for a custom tool."""

    delta: str


class CustomInputDone(_DeltaEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    """All of the text for a custom tool."""

    input: str


#: One event of a stream.
ResponseEvent: TypeAlias = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)


class CompactedResponse(Answer, kw_only=True, tag_field="object", tag="response.compaction"):
    """The user's messages, and a summary of the conversation in place of all else."""

    id: str
    created_at: int
    output: list[MessageItem | CompactionItem]
    usage: ResponseUsage


class ResponseItems(Answer, kw_only=True, tag_field="object", tag="list"):
    """A page of the items of a response's input."""

    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(Answer, kw_only=True, tag_field="object", tag="response"):
    """The response is no longer kept."""

    id: str
    deleted: Literal[True]
