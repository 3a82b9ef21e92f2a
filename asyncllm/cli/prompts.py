"""Reads prompts from a .txt, .csv or .jsonl file."""

from __future__ import annotations

import csv
import math
import sys
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asyncllm.types import Prompt

    #: A prompt, the other values of its row, and the line it ends on.
    Found = tuple[Prompt, dict[str, Any], int]


class Row(msgspec.Struct, frozen=True):
    """A prompt, the other values of its row, and the line of the file it ends on."""

    index: int
    prompt: Prompt
    rest: dict[str, Any] = {}
    line: int = 0

    @property
    def key(self) -> str:
        """The prompt's key in a line of JSON."""
        is_chat = len(self.prompt) > 0 and isinstance(self.prompt[0], dict)
        return "messages" if is_chat else "prompt"

    def number(self, name: str) -> float | None:
        """The number in a column, whose name may be in upper case; None if it is empty or missing.

        Raises:
            BadRequest: it is no number, or negative.
        """
        value = {key.strip().lower(): value for key, value in self.rest.items()}.get(name)
        if value in (None, ""):
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not 0 <= number < math.inf:
            raise BadRequest(f"line {self.line}: '{name}' is not a number: {str(value)[:50]!r}")
        return number

    @property
    def max_tokens(self) -> int | None:
        """The value of the column max_tokens. Raises like ``number``."""
        number = self.number("max_tokens")
        if number is None:
            return None
        if number < 1 or number != int(number):
            raise BadRequest(f"line {self.line}: 'max_tokens' must be a whole number above 0")
        return int(number)


def as_chat(prompt: Prompt) -> Prompt:
    """A text as a conversation that begins with it; a conversation unchanged."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def read_rows(path: Path, field: str | None = None) -> list[Row]:
    """All prompts of a file, numbered from 0.

    ``.txt`` has one on each line, except blank lines. ``.csv`` has one in the column ``field``, by
    default "prompt", in upper or lower case, or the only column. ``.jsonl`` has one under the key
    ``field``, by default "prompt" or "messages": text, token ids or chat messages.

    Raises:
        BadRequest: the content does not suit the file's name; the message has the line.
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
            # DictReader keeps surplus cells under None, and missing cells are None.
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
