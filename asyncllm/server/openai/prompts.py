"""What a request does to its prompt before it is asked, and what it wants to be told about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest, ContextLengthExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.chat.requests import OpenAIFields
    from asyncllm.server.model import Tokenizer

#: Logprobs of prompts that a stream may bring: 2 MB, which may come all at once.
MAX_STREAMED = 1 << 15


def check_truncation(asked: OpenAIFields) -> None:
    """
    Raises:
        BadRequest: a prompt of no tokens is asked for, or a side to cut where nothing is cut.
    """
    if asked.truncate_prompt_tokens == 0:
        raise BadRequest(
            "truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens"
        )
    if asked.truncation_side is not None and asked.truncate_prompt_tokens is None:
        raise BadRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")


def truncate(
    prompt_ids: list[int], asked: OpenAIFields, context: int, max_tokens: int | None
) -> list[int]:
    """The part of a prompt that is wanted: its last tokens, or its first ones.

    Args:
        context: tokens of the whole sequence; -1 asks for what it leaves to the prompt.
        max_tokens: of the answer; None is at least one.
    """
    most = asked.truncate_prompt_tokens
    if most is None:
        return prompt_ids
    if most == -1:
        most = max(1, context - (1 if max_tokens is None else max_tokens))
    if len(prompt_ids) <= most:
        return prompt_ids
    return prompt_ids[:most] if asked.truncation_side == "right" else prompt_ids[-most:]


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int | None, context: int) -> None:
    """Whether the context holds each prompt, before anything is done with its tokens.

    Raises:
        ContextLengthExceeded: one is too long; the engine would refuse it in the end.
    """
    least = 1 if max_tokens is None else max_tokens
    longest = max(map(len, prompts))
    if longest + least > context:
        raise ContextLengthExceeded(context, longest, least)


def check_scoring(
    asked: OpenAIFields, prompts: Sequence[Sequence[int]], wanted: int | None
) -> None:
    """Whether logprobs of these prompts can be sent, with ``wanted`` alternatives to each token.

    Raises:
        BadRequest: they are too many for a stream.
    """
    if wanted is None or not asked.stream:
        return
    most = (asked.n or 1) * sum(map(len, prompts)) * (1 + wanted)
    if most > MAX_STREAMED:
        name = "prompt_logprobs" if asked.prompt_logprobs is not None else "logprobs"
        raise BadRequest(
            f"{most} logprobs of prompts are more than the {MAX_STREAMED} that are streamed; ask "
            "for fewer, or without stream",
            param=name,
        )


def prompt_fields(
    asked: OpenAIFields, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The fields of an answer that say what was prompted, where they are wanted."""
    fields: dict[str, Any] = {}
    if asked.return_token_ids:
        fields["prompt_token_ids"] = prompt_ids
    if asked.return_prompt_text:
        fields["prompt_text"] = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    return fields
