"""A file of answers, one JSON line each, appended as they finish: of ``batch`` and ``generate``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar

if TYPE_CHECKING:
    from asyncllm.llm.async_llm import AsyncLLM

K = TypeVar("K", bound="Hashable")

#: Characters of a line that failed; the file has all of it.
_MOST_SHOWN: Final = 400


def keep_answered(path: Path, key_of: Callable[[bytes, int], K | None]) -> set[K]:
    """Prepare to resume: remove an incomplete last line, and lines that have no key.

    Args:
        key_of: called with a line and its number, from 1; what it raises leaves the file unchanged.

    Returns:
        The keys of the other lines.
    """
    content = path.read_bytes() if path.exists() else b""
    complete, newline, _ = content.rpartition(b"\n")  # a line's newline is written last
    kept: dict[K, bytes] = {}
    for number, line in enumerate(complete.split(b"\n") if newline else (), 1):
        key = key_of(line, number)
        if key is not None:
            kept[key] = line + b"\n"
    good = b"".join(kept.values())
    if good != content:
        # A crash leaves the old file or the new one.
        new = path.with_name(path.name + ".new")
        new.write_bytes(good)
        os.replace(new, path)
    return set(kept)


def append_answers(
    path: Path, main: Callable[[BinaryIO], Coroutine[None, None, int]], *, resume: str
) -> int:
    """Run ``main``, which appends to the file and returns how many failed; returns an exit status.

    Args:
        resume: the command that resumes, for the message after an interruption.
    """
    from asyncllm.system.event_loop import run_with_device

    try:
        with path.open("ab") as out:
            failed = run_with_device(main(out))
    except KeyboardInterrupt:
        say(f"interrupted; {resume} goes on from here")
        raise
    return 1 if failed else 0


class AnswerLines:
    """Writes lines and counts them; ``failed`` are errors, and ``first_failed`` is one of them."""

    def __init__(self, out: BinaryIO, written: Callable[[int], None]):
        self.failed = 0
        self.first_failed = b""
        self._count = 0
        self._out = out
        self._written = written

    def write(self, line: bytes, failed: bool) -> None:
        if failed:
            self.failed += 1
            self.first_failed = self.first_failed or line
        self._count += 1
        self._out.write(line)
        self._out.flush()
        self._written(self._count)


@contextmanager
def answer_lines(out: BinaryIO, llm: AsyncLLM, total: int, unit: str) -> Iterator[AnswerLines]:
    """Lines that answer one ``unit`` each, with a progress bar, and a summary at the end."""
    from asyncllm.llm.llm import Speed
    from asyncllm.system.terminal import progress_bar

    speed = Speed(llm.stats)
    with progress_bar("", total, f"{unit}s") as show:
        lines = AnswerLines(out, lambda count: show(count, str(speed)))
        yield lines
    answered = total - lines.failed
    units = unit if answered == 1 else f"{unit}s"
    say(
        f"{answered} {units} answered, {lines.failed} failed: {speed.tokens:,} tokens "
        f"in {speed.seconds:,.1f} s, {speed}"
    )
    if lines.failed:
        line = lines.first_failed.decode(errors="replace").strip()
        say(f"the first that failed: {line[:_MOST_SHOWN]}")


def say(message: str) -> None:
    """A message to the user, on stderr."""
    print(message, file=sys.stderr)
