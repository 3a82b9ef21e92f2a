"""The file that ``asyncllm generate`` writes: one JSON line per prompt, as they finish.

A line is ``{"index", "prompt" or "messages", "text", "finish_reason", "stop_reason", "usage",
"settings"}``, and ``"input"`` with the other values of the prompt's row; or ``{"index", "error"}``.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from asyncllm.cli.answer_file import keep_answered
from asyncllm.errors import AsyncLLMError, BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from asyncllm.cli.prompts import Row
    from asyncllm.types import Completion


def fingerprint(settings: Mapping[str, Any], row: Row) -> str:
    """A short name for the settings that a prompt is answered with, its own max_tokens included."""
    content = msgspec.json.encode([settings, row.max_tokens], order="deterministic")
    return blake2b(content, digest_size=6).hexdigest()


def answer_line(row: Row, answer: Completion, settings: str) -> bytes:
    """The line of an answered prompt; ``settings`` is their ``fingerprint``."""
    line: dict[str, Any] = {
        "index": row.index,
        row.key: row.prompt,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "usage": answer.usage,
        "settings": settings,
    }
    if row.rest:
        line["input"] = row.rest
    return msgspec.json.encode(line) + b"\n"


def error_line(row: Row, error: AsyncLLMError) -> bytes:
    """The line of a failed prompt; the next run tries it again."""
    return msgspec.json.encode({"index": row.index, "error": error.message}) + b"\n"


def recover(path: Path, rows: Sequence[Row], settings: Mapping[str, Any]) -> set[int]:
    """Prepare to resume an interrupted run: keep only complete lines of answers.

    Returns:
        The indexes of the prompts that are answered already.

    Raises:
        BadRequest: these are not answers to ``rows`` with ``settings``; the file is unchanged.
    """

    def index_of(line: bytes, number: int) -> int | None:
        try:
            result = msgspec.json.decode(line, type=_Result)
        except msgspec.DecodeError as error:
            raise _mismatch(path, number, str(error)) from error
        if result.index >= len(rows):
            raise _mismatch(path, number, f"there are only {len(rows)} prompts")
        if result.error is not None:
            return None
        row = rows[result.index]
        if getattr(result, row.key) != row.prompt:
            raise _mismatch(path, number, f"prompt {row.index} is a different one now")
        if result.settings is None:
            raise _mismatch(path, number, "a version wrote it that did not note the settings")
        if result.settings != fingerprint(settings, row):
            raise _mismatch(path, number, "the model or the sampling options were different")
        return row.index

    return keep_answered(path, index_of)


class _Result(msgspec.Struct):
    index: int
    prompt: Any = None
    messages: Any = None
    error: str | None = None
    settings: str | None = None


def _mismatch(path: Path, number: int, reason: str) -> BadRequest:
    return BadRequest(
        f"{path}, line {number}, is not from an earlier run of this command: {reason}; "
        "name another file or use --overwrite"
    )
