"""The body of /v1/responses; ``None`` means "not given", as in chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from asyncllm.server.chat.requests import COMPONENTS, Count, GeneratingFields, Logprobs

MAX_ITEMS: Final = 8192


class InputPart(msgspec.Struct):
    """A piece of a message, or of what a function returned; only text is supported."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["input_text", "output_text"]})]
    text: str | None = None


class InputMessage(msgspec.Struct):
    """May have no ``type``, and may have been an output."""

    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[InputPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(msgspec.Struct):
    """A call that the model has made; ``arguments`` is JSON in a string."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(msgspec.Struct):
    """What the function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: str | None = None


class ReasoningPart(msgspec.Struct):
    """A piece of the model's reasoning, or of a summary of it."""

    text: str
    type: str | None = None


class InputReasoning(msgspec.Struct):
    """The model's reasoning; without ``content``, the summary replaces it."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


class InputReference(msgspec.Struct):
    """An item of a stored response, by its id."""

    id: str
    type: Literal["item_reference"] | None = None


InputItem = InputMessage | InputCall | InputCallOutput | InputReasoning | InputReference

#: The kinds of items by their ``type``.
ITEM_KINDS: Final[dict[str, type[InputItem]]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "reasoning": InputReasoning,
    "item_reference": InputReference,
}


class FunctionTool(msgspec.Struct):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


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
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct):
    """``effort`` goes to the chat template; reasoning is not summarized."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(msgspec.Struct):
    """``include_obfuscation`` has no effect: events are not padded."""

    include_obfuscation: bool | None = None


#: Schemas to which ``AnyItem`` and ``AnyFunctionTool`` refer.
REFERRED_ITEMS: Final = (
    InputMessage,
    InputCall,
    InputCallOutput,
    InputReasoning,
    InputReference,
    FunctionTool,
)

AnyItem = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "anyOf": [{"$ref": COMPONENTS + kind.__name__} for kind in ITEM_KINDS.values()]
        }
    ),
]
AnyFunctionTool = Annotated[
    dict[str, Any], Meta(extra_json_schema={"$ref": f"{COMPONENTS}FunctionTool"})
]


class ResponsesRequest(GeneratingFields, kw_only=True):
    """The fields from ``metadata`` on change no answer; the last three are refused."""

    input: str | Annotated[list[AnyItem], Meta(max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: list[AnyFunctionTool] | None = None
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
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: list[Any] | None = None
