"""A user's own prompts for ``asyncllm bench``."""

from __future__ import annotations

from pathlib import Path

from asyncllm.bench.given import GivenPrompt
from asyncllm.cli.prompts import read_rows
from asyncllm.errors import BadRequest


def read_given(
    path: Path, column: str | None, count: int | None, max_tokens: int
) -> list[GivenPrompt]:
    """The first ``count`` prompts of a file, with its columns max_tokens and arrival.

    Args:
        max_tokens: for prompts without one.

    Raises:
        BadRequest: a value is wrong, or only some prompts have an arrival.
        OSError: the file cannot be read.
    """
    prompts = []
    rows = read_rows(path, column)[:count]
    try:
        for row in rows:
            if not row.prompt:
                raise BadRequest(f"line {row.line}: the prompt is empty")
            arrival = row.number("arrival")
            prompts.append(GivenPrompt(row.line, row.prompt, row.max_tokens or max_tokens, arrival))
        untimed = [one.line for one in prompts if one.at is None]
        if 0 < len(untimed) < len(prompts):
            raise BadRequest(f"line {untimed[0]}: no arrival, which other prompts have")
    except BadRequest as error:
        raise BadRequest(f"{path}: {error.message}") from None
    return prompts
