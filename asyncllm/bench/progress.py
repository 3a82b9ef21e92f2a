"""How far a case is, on stderr: a bar in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any, Final, Self

LINE_SECONDS: Final = 15.0


class Progress:
    """Of one case, in a ``with`` statement; what is drawn of it disappears at its end."""

    def __init__(self, case: str, total: int, unit: str):
        self._case = case
        self._total = total
        self._unit = unit
        self._bar: Any = None
        self._next_line = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=self._case, total=self._total, unit=f" {self._unit}", leave=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int) -> None:
        """So much of the total is done."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            print(f"{self._case}: {done:,} of {self._total:,} {self._unit}", file=sys.stderr)
