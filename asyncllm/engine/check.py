"""Whether a request can ever be served, found out before it costs anything."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from asyncllm.config import EngineLimits
from asyncllm.engine.prepared import is_prepared
from asyncllm.errors import BadRequest
from asyncllm.types import SamplingParams


def check_request(prompt_ids: Seq[int], params: SamplingParams, limits: EngineLimits) -> int:
    """The length at which the sequence must end.

    Raises:
        BadRequest: it can never be served (empty, too long, a token id out of range).
    """
    room = limits.max_model_len - len(prompt_ids)
    if not prompt_ids:
        raise BadRequest("the prompt is empty", param="prompt")
    least = 1 if params.max_tokens is None else params.max_tokens
    if room < least:
        asked = "" if not params.max_tokens else f" and max_tokens {params.max_tokens}"
        raise BadRequest(
            f"the prompt of {len(prompt_ids)} tokens{asked} is more than the context of "
            f"{limits.max_model_len} tokens holds",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    if params.min_tokens > room:
        raise BadRequest(f"min_tokens must be at most {room}, the room left", param="min_tokens")
    stops = len(params.stop_token_ids) + len(limits.eos_token_ids)
    if params.min_tokens and stops >= limits.vocab_size:
        raise BadRequest("stop_token_ids leave no token for min_tokens", param="stop_token_ids")
    if min(prompt_ids) < 0 or max(prompt_ids) >= limits.vocab_size:
        raise BadRequest(
            f"prompt token ids must be between 0 and {limits.vocab_size - 1}",
            param="prompt",
        )
    if any(t >= limits.vocab_size for t in params.stop_token_ids):
        raise BadRequest(
            f"stop_token_ids must be between 0 and {limits.vocab_size - 1}",
            param="stop_token_ids",
        )
    if not is_prepared(params):
        raise BadRequest("constraints on tokens must be made ready by AsyncLLM.prepare")
    return len(prompt_ids) + (room if params.max_tokens is None else params.max_tokens)
