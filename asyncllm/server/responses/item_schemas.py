"""The items of a response's input and output, as they are kept and listed."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any, Final, Literal, TypeAlias

from msgspec import UNSET, UnsetType

from asyncllm.server.http.answer import Answer
from asyncllm.server.openai.schemas import TokenLogprob

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message; ``logprobs`` on demand."""

    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class InputText(Answer, tag_field="type", tag="input_text"):
    """The text of a message that was given."""

    text: str


class ReasoningText(Answer, tag_field="type", tag="reasoning_text"):
    """The model's reasoning."""

    text: str


class SummaryText(Answer, tag_field="type", tag="summary_text"):
    """A summary that was given."""

    text: str


Part: TypeAlias = OutputText | InputText | ReasoningText | SummaryText


class MessageItem(Answer, kw_only=True, tag_field="type", tag="message"):
    """A message."""

    id: str
    status: ItemStatus
    role: Literal["assistant", "user", "system", "developer"]
    content: list[OutputText | InputText]


class ReasoningItem(Answer, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before the answer.

    ``encrypted_content`` holds it for clients that keep the conversation and ask for it; it is not
    secret.
    """

    id: str
    status: ItemStatus | UnsetType = UNSET
    summary: list[SummaryText]
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


class _CallPart(Answer, kw_only=True, tag_field="type"):
    id: str
    status: ItemStatus
    call_id: str


class FunctionCallItem(_CallPart, kw_only=True, tag="function_call"):
    """A call that the model asks for; ``arguments`` is JSON in a string."""

    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class FunctionCallOutputItem(_CallPart, kw_only=True, tag="function_call_output"):
    """The result of a call."""

    output: str


class CustomToolCallItem(_CallPart, kw_only=True, tag="custom_tool_call"):
    """A call of a tool that takes text."""

    name: str
    input: str
    namespace: str | UnsetType = UNSET


class CustomToolCallOutputItem(_CallPart, kw_only=True, tag="custom_tool_call_output"):
    """The result of a tool that takes text."""

    output: str


class LocalShellCallItem(_CallPart, kw_only=True, tag="local_shell_call"):
    """A command that the client is to run."""

    action: dict[str, Any]


class ToolSearchCallItem(_CallPart, kw_only=True, tag="tool_search_call"):
    """A search for tools that the client is to do."""

    execution: Literal["client"]
    arguments: Any


class ToolSearchOutputItem(_CallPart, kw_only=True, tag="tool_search_output"):
    """The tools that a search found: they may be called from then on."""

    execution: Literal["client"]
    tools: list[dict[str, Any]]


class AdditionalToolsItem(Answer, kw_only=True, tag_field="type", tag="additional_tools"):
    """Tools that a client gives among the items."""

    id: str
    role: str
    tools: list[dict[str, Any]]


class CompactionItem(Answer, kw_only=True, tag_field="type", tag="compaction"):
    """A summary in place of the conversation so far; only servers of this kind can read it."""

    id: str
    encrypted_content: str


CallItem: TypeAlias = (
    FunctionCallItem | CustomToolCallItem | LocalShellCallItem | ToolSearchCallItem
)
OutputItem: TypeAlias = MessageItem | ReasoningItem | CallItem | CompactionItem
#: An item of a conversation, as it is stored and listed.
Item: TypeAlias = (
    OutputItem
    | FunctionCallOutputItem
    | CustomToolCallOutputItem
    | ToolSearchOutputItem
    | AdditionalToolsItem
)

#: Begins what this server has written; what another one has encrypted cannot be read.
_OURS: Final = "asyncllm1."


def seal(text: str) -> str:
    """The text in a form that nobody takes for something to read. It is not encrypted."""
    return _OURS + b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: object) -> str | None:
    """The text; None if another server has sealed it."""
    if not isinstance(sealed, str) or not sealed.startswith(_OURS):
        return None
    try:
        return b64decode(sealed[len(_OURS) :], validate=True).decode("utf-8", "surrogatepass")
    except ValueError:
        return None
