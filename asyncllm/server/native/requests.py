"""What clients may send to the server's own routes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from asyncllm.server.chat.requests import (
    NOT_EMPTY,
    GeneratingFields,
    Messages,
    Text,
    TokenId,
    TokenIds,
    ToolChoice,
    Tools,
)


class GenerateRequest(GeneratingFields, kw_only=True):
    prompt: Text | Annotated[list[TokenId], NOT_EMPTY]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: TokenIds
