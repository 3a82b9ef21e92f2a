"""From a request's scheduling fields to SchedulingParams, and to a refusal while that is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.types import SchedulingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.chat.requests import GeneratingFields
    from asyncllm.server.model import Model


def scheduling_params(
    asked: GeneratingFields, tenant: str, *, isolated: bool = False
) -> SchedulingParams:
    """What was asked for, on behalf of ``tenant``, which is never the client's to say.

    Args:
        isolated: cached prefixes are not shared with other tenants.

    Raises:
        BadRequest: a value is out of range.
    """
    given: dict[str, Any] = {"priority": asked.priority, "cache_salt": asked.cache_salt}
    return SchedulingParams(
        tenant=tenant,
        deadline_ms=asked.deadline_ms,
        isolated=isolated,
        **{name: value for name, value in given.items() if value is not None},
    )


def expect_prompts(
    llm: Model, reservation: Reservation, prompts: Sequence[str | Sequence[int]], n: int
) -> None:
    """Reserve places for ``n`` sequences of each prompt, by what the prompts' lengths tell.

    Done before any text is tokenized: a refused request must not cost that time. A prompt that is
    too long for the context passes, because it gets an error that says so.

    Raises:
        QueueFull: not now.
    """
    least = [_least_tokens(llm, prompt) for prompt in prompts]
    if max(least) <= llm.limits.max_model_len:
        reservation.expect(n * sum(least), n * len(prompts))


def _least_tokens(llm: Model, prompt: str | Sequence[int]) -> int:
    if not isinstance(prompt, str):
        return len(prompt)
    return llm.tokenizer.min_tokens(len(prompt.encode("utf-8", "surrogatepass")))
