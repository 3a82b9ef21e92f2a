"""From a request's sampling fields to SamplingParams, and to one Job per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.structured import blame, grammar_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.server.openai.requests import GeneratingFields, OpenAIFields, StructureFields
    from asyncllm.types import SamplingParams, SchedulingParams

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


class Job(NamedTuple):
    """One sequence to submit."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    scheduling: SchedulingParams


def sampling_params(
    asked: GeneratingFields,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What was asked for, over the model's defaults.

    Raises:
        BadRequest: a value is out of range.
    """
    given = {name: value for name in _SAME_NAME if (value := getattr(asked, name)) is not None}
    if asked.stop is not None:
        given["stop"] = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        if (value := getattr(asked, name)) is not None:
            given[name] = tuple(value)
    if (grammar := grammar_of(asked)) is not None:
        given["grammar"] = grammar
    return msgspec.structs.replace(
        defaults,
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


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


async def fan_out(
    llm: AsyncLLM,
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    scheduling: SchedulingParams,
    asked: StructureFields,
) -> list[Job]:
    """``n`` sequences for each prompt, in OpenAI's order: choice ``i * n + j``.

    Raises:
        BadRequest: the parameters cannot be prepared; ``param`` is what ``asked`` calls it.
    """
    try:
        params = await llm.prepare(params)
    except BadRequest as error:
        blame(error, asked)
        raise
    variants = [_variant(params, j) for j in range(n)]
    return [Job(ids, variant, scheduling) for ids in prompts for variant in variants]


def _variant(params: SamplingParams, j: int) -> SamplingParams:
    """The same seed would give ``n`` times the same text; and a prompt is scored but once."""
    seed = params.seed
    if j == 0 or (seed is None and params.prompt_logprobs is None):
        return params
    if seed is not None:
        seed = (seed + j + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)


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
