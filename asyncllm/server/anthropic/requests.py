"""The bodies of /v1/messages; ``None`` means "not given", as in chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from asyncllm.server.chat.requests import Count, GeneratingFields, StopStrings, TokenBudget, any_of

MAX_MESSAGES: Final = 8192


class CacheControl(msgspec.Struct):
    """Pins the whole prefix, wherever it stands; the longest of a request counts.

    Without it, prefixes are cached as well, as long as there is room.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct):
    """Text."""

    type: Literal["text"]
    text: str | None
    cache_control: CacheControl | None = None
    citations: Any = None


class ThinkingBlock(msgspec.Struct):
    """The model's reasoning; the signature is not checked."""

    type: Literal["thinking"]
    thinking: str | None = None
    signature: Any = None


class RedactedThinkingBlock(msgspec.Struct):
    """Encrypted reasoning of another model: it is left out."""

    type: Literal["redacted_thinking"]
    data: Any = None


class ToolUseBlock(msgspec.Struct):
    """A call that the model has made; ``input`` is an object, or whatever the model has written."""

    type: Literal["tool_use"]
    name: str | None
    id: str | None = None
    input: Any = None
    cache_control: CacheControl | None = None
    caller: Any = None


class ToolResultBlock(msgspec.Struct):
    """What a call returned, or the message of its error.

    Images and the like are left out; other JSON than text and blocks is taken as text.
    """

    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: Any = None
    is_error: Any = None
    cache_control: CacheControl | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock

#: The kinds of blocks by their ``type``.
BLOCK_KINDS: Final[dict[str, type[Block]]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
#: The kinds that a message of a role may contain.
BLOCKS_OF: Final = {
    "user": frozenset(("text", "tool_result")),
    "assistant": frozenset(("text", "thinking", "redacted_thinking", "tool_use")),
    "system": frozenset(("text",)),
}

AnyBlock = Annotated[dict[str, Any], any_of(*BLOCK_KINDS.values())]


class InputTurn(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock] | None


class ClientTool(msgspec.Struct):
    """A tool that the model may ask the client to use."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Annotated[str, Meta(extra_json_schema={"enum": ["custom"]})] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None


AnyClientTool = Annotated[dict[str, Any], any_of(ClientTool)]

#: OpenAI's forms are taken as well.
ToolChoice = Annotated[
    str | dict[str, Any],
    Meta(
        extra_json_schema={
            "type": "object",
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]},
                "name": {"type": "string"},
                "disable_parallel_tool_use": {"type": "boolean"},
            },
            "required": ["type"],
        }
    ),
]


class Thinking(msgspec.Struct):
    """``budget_tokens`` belongs to the type ``enabled``; the last two leave it to the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: TokenBudget | None = None
    display: Any = None


class OutputFormat(msgspec.Struct):
    """The form of the text; ``output_format`` is the older name of ``output_config.format``."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """``effort`` goes to the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(GeneratingFields, kw_only=True):
    """A request for a message; only its prompt counts."""

    messages: Annotated[list[InputTurn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: list[AnyClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop_sequences: StopStrings | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Sampling and scheduling are as in chat completions.

    The fields from ``metadata`` on change no answer, so they may be anything.
    """

    max_tokens: Count
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    context_management: Any = None
    container: Any = None
    mcp_servers: Any = None


#: Schemas to which ``AnyBlock`` and ``AnyClientTool`` refer.
REFERRED_BLOCKS: Final = (*BLOCK_KINDS.values(), ClientTool)
