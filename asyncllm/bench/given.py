"""Cases with a user's own prompts instead of random token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncllm.bench.cases import OfflineCase, OnlineCase, Shot, Work
from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.types import Prompt

CLIENTS: Final = 8


class GivenPrompt(NamedTuple):
    """A prompt, the line of the file it ends on, and its arrival in seconds, if it has one."""

    line: int
    prompt: Prompt
    max_tokens: int
    at: float | None


async def offline_case(llm: AsyncLLM, given: Sequence[GivenPrompt]) -> OfflineCase:
    """All prompts at once; answers end when the model ends them, or at their max_tokens.

    Raises:
        BadRequest: a prompt does not fit the context; the message has the line.
    """
    prompts = []
    for one in given:
        try:
            ids = await llm.encode_prompt(one.prompt)
        except BadRequest as error:
            raise BadRequest(f"line {one.line}: {error.message}") from None
        if len(ids) + one.max_tokens > llm.limits.max_model_len:
            raise BadRequest(
                f"line {one.line}: {len(ids)} prompt tokens and {one.max_tokens} to generate "
                f"exceed the context of {llm.limits.max_model_len}"
            )
        prompts.append(ids)
    work = Work(prompts, [one.max_tokens for one in given], ignore_eos=False)
    return OfflineCase("prompts", lambda _repetition: work)


def online_cases(
    given: Sequence[GivenPrompt], clients: Sequence[int], rates: Sequence[float]
) -> list[OnlineCase]:
    """The prompts under each load; without loads at their own arrivals, or from 8 clients."""
    shots = [_shot(one) for one in given]
    if not clients and not rates:
        if shots[0].at is not None:
            return [OnlineCase("prompts", tuple(shots))]
        clients = [CLIENTS]
    found = [
        OnlineCase(f"{n} clients", tuple(shot._replace(at=None) for shot in shots), clients=n)
        for n in clients
    ]
    for rate in rates:
        draw, at, timed = random.Random(9), 0.0, []
        for shot in shots:
            timed.append(shot._replace(at=at))
            at += draw.expovariate(rate)
        found.append(OnlineCase(f"{rate:g}/s", tuple(timed), rate=rate))
    return found


def _shot(one: GivenPrompt) -> Shot:
    # Only the server can count the tokens of a text.
    prompt = one.prompt if isinstance(one.prompt, str) else list(one.prompt)
    return Shot(one.at, 0, one.max_tokens, seed=0, given=prompt)
