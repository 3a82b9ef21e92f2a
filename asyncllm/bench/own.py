"""Prompts of a user's own, instead of random token ids."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asyncllm.bench.cases import OfflineCase, OnlineCase, Shot, Work
from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from pathlib import Path

    from asyncllm.cli.prompts import Row
    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.types import Prompt

MAX_TOKENS: Final = 128
CLIENTS: Final = 8


class Asked(NamedTuple):
    """One prompt of a file; ``at`` is its arrival in seconds, if the file has that."""

    line: int
    prompt: Prompt
    max_tokens: int
    at: float | None


def read_asked(path: Path, rows: Sequence[Row], max_tokens: int | None = None) -> list[Asked]:
    """The prompts of a file, with its columns ``max_tokens`` and ``arrival`` where it has them.

    Args:
        max_tokens: for prompts without one.

    Raises:
        BadRequest: a value is no such number, or only some prompts have an arrival; the message
            has the line.
    """
    with _named(str(path)):
        return _read(rows, max_tokens or MAX_TOKENS)


def _read(rows: Sequence[Row], max_tokens: int) -> list[Asked]:
    asked = []
    for row in rows:
        rest = {name.strip().lower(): value for name, value in row.rest.items()}
        wanted = _number(row, rest, "max_tokens")
        if wanted is not None and (wanted < 1 or wanted != int(wanted)):
            raise BadRequest(f"line {row.line}: 'max_tokens' must be a whole number above 0")
        count = int(wanted) if wanted is not None else max_tokens
        if not row.prompt:
            raise BadRequest(f"line {row.line}: the prompt is empty")
        asked.append(Asked(row.line, row.prompt, count, _number(row, rest, "arrival")))
    timed = [one.at is not None for one in asked]
    if any(timed) and not all(timed):
        line = asked[timed.index(False)].line
        raise BadRequest(f"line {line}: no arrival, which other prompts have")
    return asked


def _number(row: Row, rest: dict[str, Any], name: str) -> float | None:
    value = rest.get(name)
    if value in (None, ""):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise BadRequest(f"line {row.line}: '{name}' is not a number: {str(value)[:50]!r}")
    return number


async def offline_case(llm: AsyncLLM, path: Path, asked: Sequence[Asked]) -> OfflineCase:
    """All prompts at once; answers end when the model ends them, or at their max_tokens.

    Raises:
        BadRequest: a prompt does not fit the context; the message has the line.
    """
    prompts = []
    for one in asked:
        with _named(f"{path}: line {one.line}"):
            ids = await llm.encode_prompt(one.prompt)
            if len(ids) + one.max_tokens > llm.limits.max_model_len:
                raise BadRequest(
                    f"{len(ids)} prompt tokens and {one.max_tokens} to generate exceed the context "
                    f"of {llm.limits.max_model_len}"
                )
            prompts.append(ids)
    work = Work(prompts, [one.max_tokens for one in asked], ignore_eos=False)
    return OfflineCase("prompts", lambda _repetition: work)


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Have errors begin with where in a file they are."""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(f"{place}: {error.message}") from None


def online_cases(
    asked: Sequence[Asked], clients: Sequence[int], rates: Sequence[float]
) -> list[OnlineCase]:
    """The same prompts for each load; for none, at their own arrivals, if they have any."""
    shots = [_shot(one) for one in asked]
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


def _shot(one: Asked) -> Shot:
    # How many tokens a text has is for the server to say.
    prompt = one.prompt if isinstance(one.prompt, str) else list(one.prompt)
    return Shot(one.at, 0, one.max_tokens, seed=0, given=prompt)
