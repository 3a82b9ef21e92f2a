"""The bodies of /v1/completions and /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from asyncllm.server.chat.requests import (
    NOT_EMPTY,
    CacheSalt,
    Count,
    KeptTokens,
    Logprobs,
    OpenAIFields,
    Text,
    TokenBudget,
    TokenId,
)
from asyncllm.types import Pooling
from asyncllm.types.params import CacheTtl, Milliseconds, Priority

#: One text, several, the token ids of one, or of several.
Prompts = Text | Annotated[list[Text | TokenId | list[TokenId]], NOT_EMPTY]


#: OpenAI's default, which clients of this route rely on.
MAX_TOKENS: Final = 16


class CompletionRequest(OpenAIFields, kw_only=True):
    """``max_tokens`` 0 only scores the prompt, and null is as if it were left out."""

    max_tokens: TokenBudget | None = MAX_TOKENS
    prompt: Prompts
    echo: bool | None = None
    logprobs: Logprobs | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The fields from ``pooling`` on are not OpenAI's."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: Any = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    deadline_ms: Milliseconds | None = None
    cache_salt: CacheSalt | None = None
    cache_ttl_s: CacheTtl | None = None
