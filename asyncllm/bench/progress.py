"""How far a case is, on stderr: a bar in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from asyncllm.terminal import progress_bar

LINE_SECONDS: Final = 15.0


@contextmanager
def case_progress(case: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the amount done."""
    if sys.stderr.isatty():
        with progress_bar(case, total, unit, transient=True) as show:
            yield lambda done: show(done, "")
        return
    next_line = time.monotonic() + LINE_SECONDS

    def print_line(done: int) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + LINE_SECONDS
            print(f"{case}: {done:,} of {total:,} {unit}", file=sys.stderr)

    yield print_line
