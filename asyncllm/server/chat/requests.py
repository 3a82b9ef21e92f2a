"""What clients may send: one Struct per route, checked strictly while it is decoded.

``None`` always means "not given", because clients send explicit nulls. Fields that cannot be
honoured yet are refused, and unknown ones found, by ``http/parse.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from asyncllm.types import params

# What reaches the executor is int32 there.
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenBudget = Annotated[int, Meta(ge=0, le=2**31 - 1)]


def _says(**schema: Any) -> Meta:
    """A bound for the description of the API, which is checked elsewhere.

    There the message is better: it tells both bounds, or why there are any.
    """
    return Meta(extra_json_schema=schema)


NOT_EMPTY: Final = _says(minItems=1)
Text = Annotated[str, _says(minLength=1)]

# Checked by SamplingParams; a test holds the bounds together.
Seed = Annotated[int, _says(minimum=-(2**63), maximum=2**63 - 1)]
StopText = Annotated[str, _says(minLength=1, maxLength=params.MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopText], _says(maxItems=params.MAX_STOP_STRINGS)]
Bias = Annotated[float, _says(minimum=-100, maximum=100)]

#: Where ``/openapi.json`` keeps the schemas.
COMPONENTS: Final = "#/components/schemas/"


def any_of(*kinds: type[msgspec.Struct]) -> Meta:
    """An object of one of these, or of another type, which is told as text or left out."""
    known = [{"$ref": COMPONENTS + kind.__name__} for kind in dict.fromkeys(kinds)]
    other = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
    return Meta(extra_json_schema={"anyOf": [*known, other]})


# The chat template gets these unchanged; ``messages.py`` checks what must be right about them.
AnyMessage = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "$ref": f"{COMPONENTS}ChatMessage",
            "if": {"properties": {"role": {"enum": ["developer", "system", "user"]}}},
            "then": {"required": ["content"]},
        }
    ),
]
AnyTool = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": f"{COMPONENTS}ChatTool"})]

# Lists that the event loop handles item by item are bounded, lest one body stalls every stream.
Messages = Annotated[list[AnyMessage], Meta(max_length=8192), NOT_EMPTY]
Tools = list[AnyTool]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
TokenIds = Annotated[list[TokenId], Meta(max_length=2**20)]
AllowedTokenIds = Annotated[list[TokenId], Meta(max_length=2**18)]
BadWord = str | Annotated[list[TokenId], Meta(max_length=params.MAX_BAD_WORD_LENGTH)]
BadWords = Annotated[list[BadWord], Meta(max_length=params.MAX_BAD_WORDS)]
LogitBias = Annotated[dict[TokenId, Bias], _says(maxProperties=params.MAX_LOGIT_BIAS)]
Logprobs = Annotated[int, Meta(ge=0, le=params.MAX_LOGPROBS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]


Schema = dict[str, Any] | bool


class NamedSchema(msgspec.Struct):
    """A JSON Schema as OpenAI wraps it; it is enforced whether or not it is ``strict``."""

    name: str | None = None
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None


class TagFormat(msgspec.Struct):
    begin: str
    schema: Schema
    end: str


class ResponseFormat(msgspec.Struct):
    """The form of an answer; ``structures`` and ``triggers`` belong to structural tags.

    A schema may also stand here, without ``json_schema`` around it.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema: Schema | None = None
    name: Any = None
    description: Any = None
    strict: Any = None
    structures: list[TagFormat] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct):
    """The form of an answer by vLLM's names; exactly one is given."""

    json: Schema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: ResponseFormat | str | None = None


class StructureFields(msgspec.Struct, kw_only=True):
    """Fields for structured output, older names included."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | str | None = None
    regex: str | None = None
    ebnf: str | None = None


class PredictedPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class PredictedOutput(msgspec.Struct):
    """What the answer is expected to repeat in large parts."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Meta(max_length=8192)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


#: Tokens of a prompt to keep; -1 keeps as many as fit.
KeptTokens = Annotated[int, Meta(ge=-1), _says(**{"not": {"const": 0}})]


class GeneratingFields(StructureFields, kw_only=True):
    """Fields of every generating route: sampling, scheduling, and the form of the answer."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: params.Temperature | None = None
    top_p: params.TopP | None = None
    top_k: params.TopK | None = None
    min_p: params.MinP | None = None
    seed: Seed | None = None
    presence_penalty: params.Penalty | None = None
    frequency_penalty: params.Penalty | None = None
    repetition_penalty: params.RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    min_tokens: params.MinTokens | None = None
    stop: StopText | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prediction: PredictedOutput | str | None = None
    priority: params.Priority | None = None
    deadline_ms: params.Milliseconds | None = None
    cache_salt: CacheSalt | None = None
    cache_ttl_s: params.CacheTtl | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    trace: bool | None = None


class StreamOptions(msgspec.Struct):
    """``include_obfuscation`` has no effect: frames are not padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class OpenAIFields(GeneratingFields, kw_only=True):
    """Fields that chats and completions share.

    Those from ``user`` on change no answer, so they may be anything.
    """

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: Logprobs | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class CalledFunction(msgspec.Struct):
    """``arguments`` is JSON in a string, the object itself, or whatever a model has written."""

    name: str | None
    arguments: Any = "{}"


class CalledCustom(msgspec.Struct):
    """A tool that takes text, and what a model has written for it."""

    name: str
    input: Any = ""


class MessageToolCall(msgspec.Struct):
    """A call that the model has made: of a ``function``, or of a tool that takes text."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class ContentPart(msgspec.Struct):
    """A piece of a message: ``text``, or a ``refusal``, which is text as well.

    Of answers and results, other pieces are left out.
    """

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct):
    """The checked fields of a message. The chat template gets all fields."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[MessageToolCall] | None = None


class ToolFunction(msgspec.Struct):
    name: str


class ChatTool(msgspec.Struct):
    """The checked fields of a tool. The chat template gets all fields.

    A function may also have the form of Responses or Messages. Tools of another type, which this
    server cannot offer, are left out.
    """

    type: Literal["function"]
    function: ToolFunction


#: The dict names one function; it is checked against the tools.
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any]

#: Schemas to which the fields above refer.
REFERRED: Final = (ChatMessage, ChatTool)


class ChatRequest(OpenAIFields, kw_only=True):
    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    max_completion_tokens: Count | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: TokenBudget | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Any = None
    web_search_options: Any = None
