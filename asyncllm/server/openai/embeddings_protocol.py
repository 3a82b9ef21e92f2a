"""What clients of /v1/embeddings send and get; as in ``protocol.py`` and ``answers.py``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from asyncllm.server.chat.requests import (
    NOT_EMPTY,
    CacheSalt,
    Count,
    KeptTokens,
    Milliseconds,
    Priority,
    Text,
    TokenId,
)
from asyncllm.server.http.answer import Answer
from asyncllm.server.openai.schemas import PromptTokensDetails
from asyncllm.types import Pooling


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``pooling`` and all that comes after it is not OpenAI's."""

    model: str | None = None
    input: Text | Annotated[list[Text | TokenId | list[TokenId]], NOT_EMPTY]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    deadline_ms: Milliseconds | None = None
    cache_salt: CacheSalt | None = None


class EmbeddingUsage(Answer, kw_only=True):
    """Tokens of all inputs; ``total_tokens`` is the same number."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingData(Answer, kw_only=True):
    """The vector of the input ``index``; in base64 it is of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Answer, kw_only=True):
    """The vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage
