"""What clients may send: one Struct per route, checked strictly while it is decoded.

``None`` always means "not given", because clients send explicit nulls. Unknown fields are ignored;
known ones that cannot be honoured yet are refused by ``unsupported.py``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from asyncllm.errors import BadRequest, TooLarge
from asyncllm.types import MAX_LOGPROBS

Count = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]

# What is handled item by item on the event loop is bounded, lest one body stalls every stream.
Messages = Annotated[list[dict[str, Any]], Meta(max_length=8192)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
TokenIds = Annotated[list[TokenId], Meta(max_length=2**20)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]


class GeneratingFields(msgspec.Struct, kw_only=True):
    """What every generating route takes: sampling, scheduling, and the form of the answer."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    cache_salt: CacheSalt | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    trace: bool | None = None


class StreamOptions(msgspec.Struct):
    """``include_obfuscation`` of OpenAI's needs no field: there is nothing to pad."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIFields(GeneratingFields, kw_only=True):
    """What OpenAI's two routes share."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: int | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None


class ChatRequest(OpenAIFields, kw_only=True):
    messages: Messages
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    max_completion_tokens: Count | None = None
    tool_choice: Any = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None


class CompletionRequest(OpenAIFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Logprobs | None = None


class GenerateRequest(GeneratingFields, kw_only=True):
    prompt: str | list[TokenId]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: TokenIds


T = TypeVar("T")

_WHERE: Final = re.compile(r" - at `\$\.?(.*)`$")
_MISSING: Final = re.compile(r"missing required field `(.*?)`")


async def read_body(request: web.Request, limit: int) -> bytearray:
    """The request's body.

    The limit is ours, not aiohttp's: in a mounted app that one belongs to the host.
    """
    body = bytearray()
    try:
        if (request.content_length or 0) > limit:
            raise TooLarge(f"the body exceeds {limit} bytes")
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > limit:
                raise TooLarge(f"the body exceeds {limit} bytes")
        return body
    except web.RequestPayloadError as error:
        raise BadRequest("the body cannot be read") from error


def text_of(body: bytearray) -> str:
    """A body as text, whatever its Content-Type claims: JSON is UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest("the body is not UTF-8") from error


def decode(body: str, kind: type[T]) -> T:
    """Parse and check a JSON body.

    Raises:
        BadRequest: malformed, or a field is missing or of the wrong type; ``param`` names it.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def invalid(error: msgspec.ValidationError) -> BadRequest:
    """msgspec's finding as a BadRequest: ``$.messages[0].role`` becomes the param."""
    message = str(error)
    where = _WHERE.search(message)
    path = where[1].removesuffix("[...]") if where else ""
    missing = _MISSING.search(message)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"{path} is required", param=path)
    text = message[: where.start()] if where else message
    return BadRequest(f"{path}: {text}" if path else text, param=path or None)
