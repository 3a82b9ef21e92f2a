"""Logs of requests that others have published: Mooncake (jsonl), Azure and BurstGPT (csv).

Each row has a time, the length of a prompt and that of its output. Mooncake also has the contents
of the prompt, as ids of its blocks of 512 tokens.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from asyncllm.engine.recording.trace_file import TraceError
from tools.bench_policies.load import Load, LoadRequest

T = TypeVar("T")

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**9)]
_Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]

#: Tokens of a block of Mooncake's traces.
MOONCAKE_BLOCK: Final = 512
_NO_OUTPUT: Final = "without output"
_NO_PROMPT: Final = "without a prompt"


class _Row(Protocol):
    """One row of a log; ``seconds`` since any time that is the same for all rows."""

    @property
    def seconds(self) -> float: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def blocks(self) -> tuple[int, ...]: ...


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: _Time  # milliseconds
    num_prompt: _Count = msgspec.field(name="input_length")
    num_output: _Count = msgspec.field(name="output_length")
    blocks: tuple[int, ...] = msgspec.field(name="hash_ids")  # any numbers

    def __post_init__(self) -> None:
        most = -(-self.num_prompt // MOONCAKE_BLOCK)
        if len(self.blocks) > most:
            raise ValueError(
                f"{len(self.blocks)} hash_ids, but a prompt of {self.num_prompt} tokens has "
                f"{most} blocks of {MOONCAKE_BLOCK}"
            )

    @property
    def seconds(self) -> float:
        return self.timestamp / 1000


class _Azure(msgspec.Struct, frozen=True):
    time: str = msgspec.field(name="TIMESTAMP")
    num_prompt: _Count = msgspec.field(name="ContextTokens")
    num_output: _Count = msgspec.field(name="GeneratedTokens")
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._when()

    @property
    def seconds(self) -> float:
        return self._when().timestamp()

    def _when(self) -> datetime:
        # The trace of 2023 names no timezone, that of 2024 does.
        when = datetime.fromisoformat(self.time)
        return when if when.tzinfo else when.replace(tzinfo=UTC)


class _BurstGPT(msgspec.Struct, frozen=True):
    seconds: _Time = msgspec.field(name="Timestamp")
    num_prompt: _Count = msgspec.field(name="Request tokens")
    num_output: _Count = msgspec.field(name="Response tokens")  # 0 of requests that failed
    blocks: tuple[int, ...] = ()


#: By the columns that their first lines name.
_CSV_KINDS: Final[tuple[type[_Azure] | type[_BurstGPT], ...]] = (_Azure, _BurstGPT)


def read_log(path: str | Path) -> Load:
    """Read a log of one of the three formats, which its first line tells.

    Rows without a prompt or without output are skipped and counted.

    Raises:
        TraceError: the file cannot be read; the message names the line and what is wrong with it.
    """
    try:
        # utf-8-sig: spreadsheets write a byte order mark.
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is no text") from None
    mooncake = bool(lines) and lines[0].lstrip().startswith("{")
    rows = _json_rows(path, lines) if mooncake else _csv_rows(path, lines)
    requests: list[LoadRequest] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        if not row.num_output:
            skipped[_NO_OUTPUT] += 1
        elif not row.num_prompt:
            skipped[_NO_PROMPT] += 1
        else:
            requests.append(LoadRequest(row.seconds, row.num_prompt, row.num_output, row.blocks))
    if not requests:
        raise TraceError(f"{path} has no requests")
    requests.sort(key=lambda request: request.arrival)
    return Load(Path(path).stem, requests, MOONCAKE_BLOCK, dict(skipped))


def _json_rows(path: str | Path, lines: list[str]) -> Iterator[_Row]:
    decode = msgspec.json.Decoder(_Mooncake).decode
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _checked(path, number, partial(decode, line))


def _csv_rows(path: str | Path, lines: list[str]) -> Iterator[_Row]:
    reader = csv.DictReader(lines)
    head = _checked(path, 1, lambda: set(reader.fieldnames or ()))
    kind = next((kind for kind in _CSV_KINDS if _columns(kind) <= head), None)
    if kind is None:
        columns = " nor ".join(", ".join(sorted(_columns(kind))) for kind in _CSV_KINDS)
        raise TraceError(
            f"{path} is no log of requests: its first line is no JSON object and does not name the "
            f"columns {columns}"
        )
    names, rows = _columns(kind), iter(reader)
    while (row := _checked(path, reader.line_num + 1, lambda: next(rows, None))) is not None:
        cells = {name: row[name] for name in names}
        convert = partial(msgspec.convert, cells, kind, strict=False)
        yield _checked(path, reader.line_num, convert)


def _columns(kind: type[msgspec.Struct]) -> set[str]:
    """The columns that must be there."""
    return {field.encode_name for field in msgspec.structs.fields(kind) if field.required}


def _checked(path: str | Path, line: int, read: Callable[[], T]) -> T:
    try:
        return read()
    except (msgspec.DecodeError, csv.Error) as error:
        raise TraceError(f"{path}, line {line}: {error}") from None
