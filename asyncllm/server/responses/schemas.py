"""What clients of /v1/responses get: its schemas in ``/openapi.json``, as in ``answers.py``."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, UnsetType

from asyncllm.server.http.answer import Answer
from asyncllm.server.openai.schemas import TokenLogprob
from asyncllm.server.trace import Trace

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message; ``logprobs`` on demand."""

    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class InputText(Answer, kw_only=True, tag_field="type", tag="input_text"):
    """The text of a message that was given."""

    text: str


class ReasoningText(Answer, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class SummaryText(Answer, kw_only=True, tag_field="type", tag="summary_text"):
    """A summary that was given."""

    text: str


class MessageItem(Answer, kw_only=True, tag_field="type", tag="message"):
    """A message."""

    id: str
    status: ItemStatus
    role: Literal["assistant", "user", "system", "developer"]
    content: list[OutputText | InputText]


class ReasoningItem(Answer, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before it answered."""

    id: str
    status: ItemStatus | UnsetType = UNSET
    summary: list[SummaryText]
    content: list[ReasoningText] | UnsetType = UNSET


class FunctionCallItem(Answer, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model wants made; ``arguments`` is JSON in a string."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Answer, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a call returned."""

    id: str
    status: ItemStatus
    call_id: str
    output: str


OutputItemAnswer = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(Answer, kw_only=True):
    """Of the input's tokens, those that did not have to be computed."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer, kw_only=True):
    """Of the output's tokens, those of reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer, kw_only=True):
    """How many tokens went in and came out."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Answer, kw_only=True):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer, kw_only=True):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ReasoningEcho(Answer, kw_only=True):
    """The reasoning that was asked for."""

    effort: str | None
    summary: None


class TextEcho(Answer, kw_only=True):
    """The text that was asked for."""

    format: dict[str, Any]


class Response(Answer, kw_only=True):
    """A response, whole or so far; what is not known is null."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItemAnswer]
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


class _Event(Answer, kw_only=True, tag_field="type"):
    sequence_number: int


class _Lifecycle(_Event, kw_only=True):
    response: Response


class _OfItem(_Event, kw_only=True):
    output_index: int
    item: OutputItemAnswer


class _InItem(_Event, kw_only=True):
    output_index: int
    item_id: str


class _InPart(_InItem, kw_only=True):
    content_index: int


class ResponseCreated(_Lifecycle, kw_only=True, tag="response.created"):
    """The first event."""


class ResponseQueued(_Lifecycle, kw_only=True, tag="response.queued"):
    """It waits, in the background."""


class ResponseInProgress(_Lifecycle, kw_only=True, tag="response.in_progress"):
    """It is being made."""


class ResponseCompleted(_Lifecycle, kw_only=True, tag="response.completed"):
    """The last event, when all went well."""


class ResponseIncomplete(_Lifecycle, kw_only=True, tag="response.incomplete"):
    """The last event, when the answer was cut off or cancelled."""


class ResponseFailed(_Lifecycle, kw_only=True, tag="response.failed"):
    """The last event, when it went wrong."""


class OutputItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    """An item is whole."""


class ContentPartAdded(_InPart, kw_only=True, tag="response.content_part.added"):
    """The text of an item begins."""

    part: OutputText | ReasoningText


class ContentPartDone(_InPart, kw_only=True, tag="response.content_part.done"):
    """The text of an item is whole."""

    part: OutputText | ReasoningText


class TextDelta(_InPart, kw_only=True, tag="response.output_text.delta"):
    """More of a message."""

    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_InPart, kw_only=True, tag="response.output_text.done"):
    """All of a message."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_InPart, kw_only=True, tag="response.reasoning_text.delta"):
    """More of what the model thinks."""

    delta: str


class ReasoningDone(_InPart, kw_only=True, tag="response.reasoning_text.done"):
    """All that the model thought."""

    text: str


class ArgumentsDelta(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    name: str
    arguments: str


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
)


class ResponseItems(Answer, kw_only=True):
    """A page of the items that a response was made of."""

    object: Literal["list"]
    data: list[MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(Answer, kw_only=True):
    """The response is no longer kept."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
