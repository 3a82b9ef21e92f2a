"""From a request's scheduling fields to SchedulingParams, and an early check of the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.server.chat.requests import GeneratingFields
from asyncllm.types import SchedulingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.engine.requests.reservations import Reservation
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
    fields = GeneratingFields.__struct_fields__
    same = [name for name in SchedulingParams.__struct_fields__ if name in fields]
    given = {name: value for name in same if (value := getattr(body, name)) is not None}
    return SchedulingParams(tenant=tenant, isolated=isolated, **given)


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
