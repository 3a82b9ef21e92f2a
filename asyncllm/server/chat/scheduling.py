"""From a request's scheduling fields to SchedulingParams, and an early check of the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.types import SchedulingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.chat.requests import GeneratingFields
    from asyncllm.server.model import Model


def scheduling_params(
    body: GeneratingFields, tenant: str, *, isolated: bool = False
) -> SchedulingParams:
    """The request's parameters; the tenant is never the client's choice.

    Args:
        isolated: whether cached prefixes are not shared with other tenants.

    Raises:
        BadRequest: a value is out of range.
    """
    given: dict[str, Any] = {"priority": body.priority, "cache_salt": body.cache_salt}
    return SchedulingParams(
        tenant=tenant,
        deadline_ms=body.deadline_ms,
        cache_ttl_s=body.cache_ttl_s,
        isolated=isolated,
        **{name: value for name, value in given.items() if value is not None},
    )


def expect_prompts(
    llm: Model, reservation: Reservation, prompts: Sequence[str | Sequence[int]], n: int
) -> None:
    """Reserve places for ``n`` sequences of each prompt, by the least tokens that they can have.

    Called before any text is tokenized, so that a refused request does not cost that time. A prompt
    that is too long for the context passes here and gets its own error later.

    Raises:
        QueueFull: the queue has no room for them now.
    """
    least = [_least_tokens(llm, prompt) for prompt in prompts]
    if max(least) <= llm.limits.max_model_len:
        reservation.expect(n * sum(least), n * len(prompts))


def _least_tokens(llm: Model, prompt: str | Sequence[int]) -> int:
    if not isinstance(prompt, str):
        return len(prompt)
    return llm.tokenizer.min_tokens(len(prompt.encode("utf-8", "surrogatepass")))
