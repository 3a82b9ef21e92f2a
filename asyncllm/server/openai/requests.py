"""What clients may send to /v1/completions."""

from __future__ import annotations

from typing import Annotated

from asyncllm.server.chat.requests import (
    NOT_EMPTY,
    Logprobs,
    OpenAIFields,
    Text,
    TokenBudget,
    TokenId,
)


class CompletionRequest(OpenAIFields, kw_only=True):
    """``max_tokens`` 0 only scores the prompt."""

    max_tokens: TokenBudget | None = None
    prompt: Text | Annotated[list[Text | TokenId | list[TokenId]], NOT_EMPTY]
    echo: bool | None = None
    logprobs: Logprobs | None = None
