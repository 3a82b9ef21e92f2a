"""The body of /v1/responses; ``None`` means "not given", as in chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from asyncllm.server.chat.requests import Count, GeneratingFields, Logprobs, any_of

MAX_ITEMS: Final = 8192


class InputPart(msgspec.Struct):
    """A piece of a message; a refusal is text, other pieces of answers are left out."""

    type: str
    text: str | msgspec.UnsetType | None = msgspec.UNSET
    refusal: str | msgspec.UnsetType | None = msgspec.UNSET


class _InputItem(msgspec.Struct, kw_only=True):
    id: str | None = None


class _WithStatus(_InputItem, kw_only=True):
    status: str | None = None


class _CallPart(_WithStatus, kw_only=True):
    call_id: str | None = None
    namespace: str | None = None


class InputMessage(_WithStatus, kw_only=True):
    """May have no ``type``, and may have been an output."""

    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[InputPart] | None
    type: Literal["message"] = "message"
    phase: str | None = None


class InputCall(_CallPart, kw_only=True):
    """A call that the model has made; ``arguments`` is JSON in a string, or what it wrote."""

    type: Literal["function_call"]
    name: str | None
    arguments: Any = ""


class InputCallOutput(_CallPart, kw_only=True):
    """What a function returned: text, or a list of parts.

    Without ``call_id``, the client says something that no model has asked for, by ``name``; without
    that, too, it is the result of the first call that has none.
    """

    type: Literal["function_call_output"]
    output: Any = ""
    name: str | None = None


class InputCustomCall(_CallPart, kw_only=True):
    """A call of a tool that takes text; ``input`` may be any JSON."""

    type: Literal["custom_tool_call"]
    name: str
    input: Any = ""


class InputCustomCallOutput(_CallPart, kw_only=True):
    """What a tool returned that takes text; see ``InputCallOutput``."""

    type: Literal["custom_tool_call_output"]
    output: Any = ""
    name: str | None = None


class InputShellCall(_WithStatus, kw_only=True):
    """A command that the model wants to be run."""

    type: Literal["local_shell_call"]
    action: dict[str, Any]
    call_id: str | None = None


class InputSearchCall(_InputItem, kw_only=True):
    """A search for tools; without ``call_id``, another server has done it."""

    type: Literal["tool_search_call"]
    arguments: Any = None
    call_id: str | None = None


class InputSearchOutput(_InputItem, kw_only=True):
    """The tools that were found: they may be called from then on."""

    type: Literal["tool_search_output"]
    tools: list[dict[str, Any]] | None = None
    call_id: str | None = None


class InputTools(_InputItem, kw_only=True):
    """Further tools."""

    type: Literal["additional_tools"]
    tools: list[dict[str, Any]]
    role: str = "developer"


class ReasoningPart(msgspec.Struct):
    """A piece of the model's reasoning, or of a summary of it."""

    text: str | None = None
    type: str | None = None


class InputReasoning(_WithStatus, kw_only=True):
    """The model's reasoning; without ``content``, what this server encoded or the summary is it."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None


class InputCompaction(_InputItem, kw_only=True):
    """A summary that this server has made; those of others are left out."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: str | None = None


class CompactionTrigger(_InputItem, kw_only=True):
    """The answer is to be a compaction of what comes before."""

    type: Literal["compaction_trigger"]


class InputReference(msgspec.Struct):
    """An item of a stored response, by its id."""

    id: str
    type: Literal["item_reference"] | None = None


#: The kinds of items by their ``type``; others are told to the model as text, or left out.
ITEM_KINDS: Final[dict[str, type[msgspec.Struct]]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "custom_tool_call": InputCustomCall,
    "custom_tool_call_output": InputCustomCallOutput,
    "local_shell_call": InputShellCall,
    "tool_search_call": InputSearchCall,
    "tool_search_output": InputSearchOutput,
    "additional_tools": InputTools,
    "reasoning": InputReasoning,
    "compaction": InputCompaction,
    "compaction_summary": InputCompaction,
    "compaction_trigger": CompactionTrigger,
    "item_reference": InputReference,
}


class FunctionTool(msgspec.Struct):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(msgspec.Struct):
    """A tool that takes text; a grammar for it is told to the model, and not enforced."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(msgspec.Struct):
    """A group of tools, whose names begin with that of the group."""

    type: Literal["namespace"]
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


TOOL_KINDS: Final[tuple[type[msgspec.Struct], ...]] = (FunctionTool, CustomTool, NamespaceTool)


class TextFormat(msgspec.Struct, omit_defaults=True):
    """The form of the text; ``schema`` and ``name`` belong to ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningConfig(msgspec.Struct):
    """``effort`` goes to the chat template; reasoning is not summarized."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseStreamOptions(msgspec.Struct):
    """``include_obfuscation`` has no effect: events are not padded."""

    include_obfuscation: bool | None = None


#: Schemas to which ``AnyItem`` and ``AnyResponseTool`` refer.
REFERRED_ITEMS: Final = (*ITEM_KINDS.values(), *TOOL_KINDS)


AnyItem = Annotated[dict[str, Any], any_of(*ITEM_KINDS.values())]
AnyResponseTool = Annotated[dict[str, Any], any_of(*TOOL_KINDS)]


class ResponsesRequest(GeneratingFields, kw_only=True):
    """The fields from ``max_tool_calls`` on change no answer; the last two are refused."""

    input: str | Annotated[list[AnyItem], Meta(max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: list[AnyResponseTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Logprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: int | None = None
    metadata: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    context_management: Any = None
    conversation: Any = None
    prompt: Any = None


class CompactRequest(ResponsesRequest, kw_only=True):
    """A conversation to be compacted, as for a response."""

    input: str | Annotated[list[AnyItem], Meta(max_length=MAX_ITEMS)] | None = None  # type: ignore[assignment]
