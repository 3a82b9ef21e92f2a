"""From the texts of a request to the token ids of its prompts, and what they may have at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from asyncllm.engine.requests.reservations import Reservation
from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import OpenAIFields
from asyncllm.server.model import Model
from asyncllm.types import SamplingParams


def split_prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """One text or list of token ids for each prompt, from any of the four forms."""
    if isinstance(prompt, str):
        prompt = [prompt]
    kinds = set(map(type, prompt))  # in C: there may be a million
    if kinds == {int}:
        prompt = [prompt]
    elif len(kinds) > 1:
        raise BadRequest("prompt mixes texts and token ids", param="prompt")
    if not prompt or not all(prompt):
        raise BadRequest("the prompt is empty", param="prompt")
    return prompt


def expect_prompts(
    llm: Model, reservation: Reservation, prompts: Sequence[str | Sequence[int]], n: int
) -> None:
    """Reserve places for ``n`` sequences of each prompt, by the least tokens that they can have.

    Called before any text is tokenized, so that a refused request does not cost that time. A prompt
    that is too long for the context passes here and gets its own error later.

    Raises:
        QueueFull: the queue has no room for them now.
    """
    least = [
        llm.tokenizer.min_tokens(len(prompt.encode("utf-8", "surrogatepass")))
        if isinstance(prompt, str)
        else len(prompt)
        for prompt in prompts
    ]
    if max(least) <= llm.limits.max_model_len:
        reservation.expect(n * sum(least), n * len(prompts))


async def encode_prompts(
    llm: Model, given: list[str] | list[list[int]], body: OpenAIFields
) -> list[list[int]]:
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in given if not isinstance(prompt, str)]
    return await llm.encode_all(
        texts,
        add_special_tokens=body.add_special_tokens is not False,
        any_length=body.truncate_prompt_tokens is not None,
    )


def truncate(
    prompt_ids: list[int], body: OpenAIFields, context: int, max_tokens: int | None
) -> list[int]:
    """The last tokens of a prompt, or the first ones if that is the ``truncation_side``.

    Args:
        context: tokens of the whole sequence; length -1 is what the answer leaves of it.
        max_tokens: tokens of the answer; None counts as one.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt_ids
    if most == -1:
        most = max(1, context - (1 if max_tokens is None else max_tokens))
    if len(prompt_ids) <= most:
        return prompt_ids
    return prompt_ids[:most] if body.truncation_side == "right" else prompt_ids[-most:]


def cut_to_fit(params: SamplingParams, prompt_ids: Sequence[int], context: int) -> SamplingParams:
    """Parameters with ``max_tokens`` cut to the room that the prompt leaves in the context.

    For APIs where asking for more is not an error. A prompt that fills the context still is one.
    """
    room = max(1, context - len(prompt_ids))
    if (params.max_tokens or 0) <= room:
        return params
    return msgspec.structs.replace(params, max_tokens=room)
