"""From a request's sampling fields to SamplingParams, and to one Job per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.structured import blame, grammar_of
from asyncllm.server.streaming.delivery import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.chat.requests import GeneratingFields, StructureFields
    from asyncllm.server.model import Model
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


def sampling_params(
    body: GeneratingFields,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The request's parameters, over the model's defaults.

    Raises:
        BadRequest: a value is out of range.
    """
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        if (value := getattr(body, name)) is not None:
            given[name] = tuple(value)
    if (grammar := grammar_of(body)) is not None:
        given["grammar"] = grammar
    return msgspec.structs.replace(
        defaults,
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


async def fan_out(
    llm: Model,
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    scheduling: SchedulingParams,
    body: StructureFields,
) -> list[Job]:
    """``n`` sequences for each prompt, in OpenAI's order: choice ``i * n + j``.

    Raises:
        BadRequest: the parameters cannot be prepared; ``param`` is the field of ``body``.
    """
    try:
        params = await llm.prepare(params)
    except BadRequest as error:
        blame(error, body)
        raise
    variants = [_variant(params, j) for j in range(n)]
    return [Job(ids, variant, scheduling) for ids in prompts for variant in variants]


def _variant(params: SamplingParams, j: int) -> SamplingParams:
    """Answers need different seeds to differ; the first one alone scores the prompt."""
    seed = params.seed
    if j == 0 or (seed is None and params.prompt_logprobs is None):
        return params
    if seed is not None:
        seed = (seed + j + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
