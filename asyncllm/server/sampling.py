"""From a request's sampling fields to SamplingParams, and to one Job per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.unsupported import unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.protocol import GeneratingFields, OpenAIFields
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
) -> SamplingParams:
    """What was asked for, over the model's defaults.

    Raises:
        BadRequest: a value is out of range.
    """
    given = {name: value for name in _SAME_NAME if (value := getattr(asked, name)) is not None}
    if asked.stop is not None:
        given["stop"] = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
    if asked.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(asked.stop_token_ids)
    return msgspec.structs.replace(defaults, **given, max_tokens=max_tokens, logprobs=logprobs)


def check_count(num_prompts: int, n: int, most: int) -> None:
    """Before any prompt is encoded: whether the queue could ever take them all at once.

    Raises:
        BadRequest: they are more than ``most`` sequences.
    """
    if num_prompts * n > most:
        raise BadRequest(
            f"{num_prompts} prompts with n={n} are more than {most} sequences",
            param="prompt" if num_prompts > 1 else "n",
        )


def fan_out(
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    scheduling: SchedulingParams,
) -> list[Job]:
    """``n`` sequences for each prompt, in OpenAI's order: choice ``i * n + j``."""
    variants = [_with_seed(params, j) for j in range(n)]
    return [Job(ids, variant, scheduling) for ids in prompts for variant in variants]


def _with_seed(params: SamplingParams, j: int) -> SamplingParams:
    """The same seed would give ``n`` times the same text."""
    if params.seed is None or j == 0:
        return params
    seed = (params.seed + j + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed)


def check_options(asked: OpenAIFields) -> None:
    """What cannot be seen from one field alone."""
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise unsupported("best_of")
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options needs stream", param="stream_options")
