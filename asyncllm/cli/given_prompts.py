"""Cases of ``asyncllm bench`` with a user's own prompts instead of random token ids."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from asyncllm.cli.prompts import Row, read_rows
from asyncllm.errors import BadRequest
from asyncllm.lab.bench.cases import OfflineCase, OnlineCase, Shot, Work

if TYPE_CHECKING:
    from asyncllm.llm.async_llm import AsyncLLM

CLIENTS: Final = 8


class GivenPrompts:
    """The first prompts of a file, with its columns max_tokens and arrival (in seconds).

    Attributes:
        timed: the prompts have arrivals.
    """

    def __init__(self, path: Path, column: str | None, count: int | None, max_tokens: int):
        """``max_tokens`` is for prompts without one.

        Raises:
            BadRequest: a value is wrong, or only some prompts have an arrival.
            OSError: the file cannot be read.
        """
        self._path = path
        self._rows: list[tuple[Row, int, float | None]] = []
        for row in read_rows(path, column)[:count]:
            with self._named():
                if not row.prompt:
                    raise BadRequest(f"line {row.line}: the prompt is empty")
                self._rows.append((row, row.max_tokens or max_tokens, row.number("arrival")))
        untimed = [row.line for row, _, at in self._rows if at is None]
        self.timed = not untimed
        if 0 < len(untimed) < len(self._rows):
            raise BadRequest(f"{path}: line {untimed[0]}: no arrival, which other prompts have")

    async def offline_case(self, llm: AsyncLLM) -> OfflineCase:
        """All prompts at once; answers end when the model ends them, or at their max_tokens.

        Raises:
            BadRequest: a prompt does not fit the context; the message has the line.
        """
        prompts = []
        for row, max_tokens, _ in self._rows:
            with self._named(f"line {row.line}: "):
                ids = await llm.encode_prompt(row.prompt)
                if len(ids) + max_tokens > llm.limits.max_model_len:
                    raise BadRequest(
                        f"{len(ids)} prompt tokens and {max_tokens} to generate exceed the context "
                        f"of {llm.limits.max_model_len}"
                    )
                prompts.append(ids)
        work = Work(prompts, [count for _, count, _ in self._rows], ignore_eos=False)
        return OfflineCase("prompts", lambda _repetition: work)

    def online_cases(self, clients: Sequence[int], rates: Sequence[float]) -> list[OnlineCase]:
        """The prompts under each load; without loads at their own arrivals, or from 8 clients."""
        # Only the server can count the tokens of a text.
        shots = tuple(
            Shot(at, 0, count, seed=0, given=cast("str | list[Any]", row.prompt))
            for row, count, at in self._rows
        )
        if self.timed and not clients and not rates:
            return [OnlineCase("prompts", shots)]
        untimed = tuple(shot._replace(at=None) for shot in shots)
        if not clients and not rates:
            clients = [CLIENTS]
        found = [OnlineCase(f"{n} clients", untimed, clients=n) for n in clients]
        for rate in rates:
            draw, at, timed = random.Random(9), 0.0, []
            for shot in shots:
                timed.append(shot._replace(at=at))
                at += draw.expovariate(rate)
            found.append(OnlineCase(f"{rate:g}/s", tuple(timed), rate=rate))
        return found

    @contextmanager
    def _named(self, line: str = "") -> Iterator[None]:
        """Errors begin with the file."""
        try:
            yield
        except BadRequest as error:
            raise BadRequest(f"{self._path}: {line}{error.message}") from None
