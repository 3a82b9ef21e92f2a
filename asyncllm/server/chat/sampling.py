"""From a request's sampling fields to SamplingParams, and to one Job per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import GeneratingFields
from asyncllm.server.chat.structured import blame, grammar_of
from asyncllm.server.streaming.delivery import Job
from asyncllm.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.chat.requests import StructureFields
    from asyncllm.server.model import Model
    from asyncllm.types import SchedulingParams

_SAME_NAME: Final = tuple(
    name for name in GeneratingFields.__struct_fields__ if name in SamplingParams.__struct_fields__
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
    if (grammar := grammar_of(body)) is not None:
        given["grammar"] = grammar
    limits = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    return msgspec.structs.replace(defaults, **given | limits)


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
