"""Truncating prompts, checking their lengths, and the fields of an answer about its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest, ContextLengthExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.chat.requests import OpenAIFields
    from asyncllm.server.model import Tokenizer

#: The most prompt logprobs in a stream: about 2 MB, possibly in one write.
MAX_STREAMED = 1 << 15


def check_truncation(body: OpenAIFields) -> None:
    """
    Raises:
        BadRequest: no token would be left, or there is a side but no length.
    """
    if body.truncate_prompt_tokens == 0:
        raise BadRequest(
            "truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens"
        )
    if body.truncation_side is not None and body.truncate_prompt_tokens is None:
        raise BadRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")


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


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int | None, context: int) -> None:
    """Check early what the engine would refuse in the end.

    Raises:
        ContextLengthExceeded: a prompt is too long.
    """
    least = 1 if max_tokens is None else max_tokens
    longest = max(map(len, prompts))
    if longest + least > context:
        raise ContextLengthExceeded(context, longest, least)


def check_scoring(body: OpenAIFields, prompts: Sequence[Sequence[int]], wanted: int | None) -> None:
    """
    Args:
        wanted: alternatives to each token of the prompts; None if there are no logprobs.

    Raises:
        BadRequest: the logprobs are too many for a stream.
    """
    if wanted is None or not body.stream:
        return
    most = (body.n or 1) * sum(map(len, prompts)) * (1 + wanted)
    if most > MAX_STREAMED:
        name = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs"
        raise BadRequest(
            f"{most} logprobs of prompts are more than the {MAX_STREAMED} that are streamed; ask "
            "for fewer, or without stream",
            param=name,
        )


def prompt_fields(
    body: OpenAIFields, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The fields of an answer that repeat its prompt, if the request asks for them."""
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["prompt_token_ids"] = prompt_ids
    if body.return_prompt_text:
        fields["prompt_text"] = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    return fields
