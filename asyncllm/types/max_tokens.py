"""How long an answer may become when the request does not say."""

from __future__ import annotations

from typing import Final

import msgspec

from asyncllm.types import Prompt, SamplingParams, is_conversation

#: Limit of an answer to raw text. A chat ends by itself; raw text often goes on until the context
#: is full. OpenAI's 16 would cut nearly every answer.
RAW_MAX_TOKENS: Final = 256


def bounded(
    params: SamplingParams, prompt: Prompt, num_tokens: int, max_model_len: int
) -> SamplingParams:
    """The same parameters with a ``max_tokens``, unless they have one or the prompt is a chat."""
    if params.max_tokens is not None or is_conversation(prompt):
        return params
    most = default_max_tokens(params, max(1, max_model_len - num_tokens))
    return msgspec.structs.replace(params, max_tokens=most)


def default_max_tokens(params: SamplingParams, room: int) -> int:
    """The ``max_tokens`` of an answer to raw text, with ``room`` tokens left in the context."""
    return min(room, max(RAW_MAX_TOKENS, params.min_tokens))
