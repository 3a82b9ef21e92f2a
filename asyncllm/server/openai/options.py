"""Options of OpenAI's routes about how many answers there are: n, best_of, beam search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from asyncllm.server.chat.requests import OpenAIFields


def check_count(num_prompts: int, asked: OpenAIFields, most: int) -> None:
    """Before any prompt is encoded: whether the queue could ever take them all at once.

    Raises:
        BadRequest: they are more than ``most`` sequences.
    """
    name, count = "n" if asked.best_of is None else "best_of", num_generated(asked)
    if num_prompts * count > most:
        raise BadRequest(
            f"{num_prompts} prompts with {name}={count} are more than {most} sequences",
            param="prompt" if num_prompts > 1 else name,
        )


def num_generated(asked: OpenAIFields) -> int:
    """How many sequences each prompt gets; ``n`` of them are answered."""
    return asked.best_of or asked.n or 1


def logprobs_needed(asked: OpenAIFields, logprobs: int | None) -> int | None:
    """What the engine is asked for: without logprobs, nobody knows which answers are the best."""
    return 0 if logprobs is None and num_generated(asked) > (asked.n or 1) else logprobs


def check_options(asked: OpenAIFields) -> None:
    """What cannot be seen from one field alone."""
    n = asked.n or 1
    if asked.best_of is not None and asked.best_of < n:
        raise BadRequest(f"best_of must be at least n, which is {n}", param="best_of")
    if not asked.use_beam_search:
        if asked.stream and asked.best_of not in (None, n):
            raise BadRequest(
                "best_of cannot be streamed: which answers are the best is known at their end",
                param="best_of",
            )
        if asked.length_penalty not in (None, 1.0):
            raise BadRequest("length_penalty needs use_beam_search", param="length_penalty")
        if asked.early_stopping:
            raise BadRequest("early_stopping needs use_beam_search", param="early_stopping")
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options needs stream", param="stream_options")
