"""The bar that is drawn while weights are loaded."""

from __future__ import annotations

import sys
from typing import Any

#: A smaller model is loaded before a line in a log file would be worth it.
LOGGED_BYTES = 100 * 2**20


class LoadingBar:
    """Draws what ``AsyncLLM(progress=...)`` reports, in bytes, on stderr."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            worth_it = sys.stderr.isatty() or total > LOGGED_BYTES
            self._bar = tqdm(
                total=total, desc="loading", unit="B", unit_scale=True, disable=not worth_it
            )
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
