"""Reads prompts from a .txt, .csv or .jsonl file."""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asyncllm.types import Prompt

    #: A prompt, what else stood beside it, and the line it ends on.
    Found = tuple[Prompt, dict[str, Any], int]


class Row(msgspec.Struct, frozen=True):
    """One prompt of the file, and the line it ends on; ``rest`` is what else stood beside it."""

    index: int
    prompt: Prompt
    rest: dict[str, Any] = {}
    line: int = 0

    @property
    def key(self) -> str:
        """What the prompt is called in a line of JSON."""
        is_chat = len(self.prompt) > 0 and isinstance(self.prompt[0], dict)
        return "messages" if is_chat else "prompt"


def as_chat(prompt: Prompt) -> Prompt:
    """A text as a conversation that begins with it; a conversation as it is."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def read_rows(path: Path, field: str | None = None) -> list[Row]:
    """All prompts of a file, numbered from 0.

    ``.txt`` has one on each line, blank lines aside. ``.csv`` has one in the column ``field``, by
    default "prompt", in upper or lower case, or the only column. ``.jsonl`` has one under the key
    ``field``, by default "prompt" or "messages": text, token ids or chat messages.

    Raises:
        BadRequest: the file is not what its name says; the message has the line.
        OSError: it cannot be read.
    """
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise BadRequest(f"{path}: the name must end in {', '.join(READERS)}")
    # utf-8-sig, because spreadsheets put a byte order mark at the start of a .csv.
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows = [Row(i, *found) for i, found in enumerate(read(file, field))]
        except UnicodeDecodeError as error:
            raise BadRequest(f"{path} is not UTF-8") from error
        except BadRequest as error:
            raise BadRequest(f"{path}: {error.message}") from error
    if not rows:
        raise BadRequest(f"{path} has no prompts")
    return rows


def _read_txt(file: TextIO, field: str | None) -> Iterator[Found]:
    if field is not None:
        raise BadRequest("a .txt file has no fields")
    for number, line in enumerate(file, 1):
        if text := line.rstrip("\r\n"):
            yield text, {}, number


def _read_csv(file: TextIO, field: str | None) -> Iterator[Found]:
    csv.field_size_limit(sys.maxsize)  # the default, 128 KiB, is less than a long prompt
    table = csv.DictReader(file)
    columns = list(table.fieldnames or ())
    named = [name for name in columns if name.strip().lower() == "prompt"]
    column = field or (named or columns if len(named or columns) == 1 else ["prompt"])[0]
    if column not in columns:
        raise BadRequest(f"no column {column!r} among {', '.join(columns)}; name one with --column")
    try:
        for cells in table:
            # Cells that a line has too many are under None; those that it has too few are None.
            rest = {name: cell for name, cell in cells.items() if name not in (None, column)}
            if cells[column] is None:
                raise BadRequest(f"line {table.line_num}: too few columns")
            yield cells[column], rest, table.line_num
    except csv.Error as error:
        raise BadRequest(f"line {table.line_num}: {error}") from error


def _read_jsonl(file: TextIO, field: str | None) -> Iterator[Found]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            item = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BadRequest(f"line {number}: {error}") from error
        keys = [field] if field else ["prompt", "messages"]
        key = next((key for key in keys if key in item), None)
        if key is None:
            raise BadRequest(f"line {number}: no {' or '.join(map(repr, keys))}")
        prompt = item.pop(key)
        if not _is_prompt(prompt):
            raise BadRequest(f"line {number}: {key!r} is not text, token ids or chat messages")
        yield prompt, item, number


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return all(type(i) is int for i in value) or all(isinstance(i, dict) for i in value)
    return isinstance(value, str)


READERS = {".txt": _read_txt, ".csv": _read_csv, ".jsonl": _read_jsonl}
