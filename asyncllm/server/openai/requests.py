"""The bodies of /v1/completions and /v1/embeddings, and checks of the fields that chats and
completions share."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from asyncllm.errors import BadRequest
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


def check_options(body: OpenAIFields, num_prompts: int, most: int) -> None:
    """Check fields that depend on each other, before any prompt is encoded.

    Args:
        most: sequences that the queue can take.

    Raises:
        BadRequest: they contradict each other, no token of a prompt would be left, or there are
            more sequences than the queue can ever take.
    """
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise BadRequest(f"best_of must be at least n, which is {n}", param="best_of")
    if not body.use_beam_search:
        if body.stream and body.best_of not in (None, n):
            raise BadRequest(
                "best_of cannot be streamed: which answers are the best is known at their end",
                param="best_of",
            )
        if body.length_penalty not in (None, 1.0):
            raise BadRequest("length_penalty needs use_beam_search", param="length_penalty")
        if body.early_stopping:
            raise BadRequest("early_stopping needs use_beam_search", param="early_stopping")
    if body.truncate_prompt_tokens == 0:
        raise BadRequest(
            "truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens"
        )
    if body.truncation_side is not None and body.truncate_prompt_tokens is None:
        raise BadRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")
    name, count = "n" if body.best_of is None else "best_of", num_generated(body)
    if num_prompts * count > most:
        raise BadRequest(
            f"{num_prompts} prompts with {name}={count} are more than {most} sequences",
            param="prompt" if num_prompts > 1 else name,
        )


def num_generated(body: OpenAIFields) -> int:
    """How many sequences each prompt gets; ``n`` of them are answered."""
    return body.best_of or body.n or 1


def logprobs_needed(body: OpenAIFields, logprobs: int | None) -> int | None:
    """The engine's ``logprobs``: choosing the best answers needs them, too."""
    return 0 if logprobs is None and num_generated(body) > (body.n or 1) else logprobs


def ineffective_fields(body: OpenAIFields) -> list[str]:
    """Known fields that were given and have no effect, of which the client is told."""
    of_chats = ("verbosity", "web_search_options")
    names = [name for name in of_chats if getattr(body, name, None) is not None]
    if body.stream_options is not None and not body.stream:
        names.append("stream_options")
    return names
