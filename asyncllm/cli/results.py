"""The file that ``asyncllm generate`` writes: one JSON line per prompt, as they finish.

A line is ``{"index", "prompt" or "messages", "text", "finish_reason", "stop_reason", "usage"}``,
and ``"input"`` with what else stood beside the prompt; or ``{"index", "error"}``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from asyncllm.errors import AsyncLLMError, BadRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncllm.cli.prompts import Row
    from asyncllm.types import Completion


def answer_line(row: Row, answer: Completion) -> bytes:
    """The line for a prompt that was answered."""
    line: dict[str, Any] = {
        "index": row.index,
        row.key: row.prompt,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "usage": answer.usage,
    }
    if row.rest:
        line["input"] = row.rest
    return msgspec.json.encode(line) + b"\n"


def error_line(row: Row, error: AsyncLLMError) -> bytes:
    """The line for a prompt that failed; the next run tries it again."""
    return msgspec.json.encode({"index": row.index, "error": error.message}) + b"\n"


def recover(path: Path, rows: Sequence[Row]) -> set[int]:
    """Make ready to go on where an interrupted run stopped.

    Half a line at the end of the file, and the lines of prompts that failed, are taken out.

    Returns:
        The indexes of the prompts that are answered already.

    Raises:
        BadRequest: these are not results for ``rows``; the file is left as it is.
    """
    content = path.read_bytes() if path.exists() else b""
    # The newline is written last: what follows the last one is half a line.
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    answered: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        try:
            result = msgspec.json.decode(line, type=_Result)
        except msgspec.DecodeError as error:
            raise _mismatch(path, number, str(error)) from error
        if result.index >= len(rows):
            raise _mismatch(path, number, f"there are only {len(rows)} prompts")
        if result.error is None:
            row = rows[result.index]
            if getattr(result, row.key) != row.prompt:
                raise _mismatch(path, number, f"prompt {row.index} is a different one now")
            answered[row.index] = line
    good = b"".join(answered.values())
    if good != content:
        replace_file(path, good)
    return set(answered)


class _Result(msgspec.Struct):
    index: int
    prompt: Any = None
    messages: Any = None
    error: str | None = None


def _mismatch(path: Path, number: int, reason: str) -> BadRequest:
    return BadRequest(
        f"{path}, line {number}, is not from an earlier run with these prompts: {reason}; "
        "name another file or use --overwrite"
    )


def replace_file(path: Path, content: bytes) -> None:
    """Change the file as a whole: a crash leaves the old one or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    os.replace(new, path)
