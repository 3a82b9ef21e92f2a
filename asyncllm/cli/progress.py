"""The bar that is drawn while weights are loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from asyncllm.terminal import progress_bar

#: A smaller model is loaded before a line in a log file would be worth it.
LOGGED_BYTES: Final = 100 * 2**20


class LoadingBar:
    """Draws what ``AsyncLLM(progress=...)`` reports, in bytes, on stderr."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._show: Callable[[int, str], None] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._show is None:
            shown = sys.stderr.isatty() or total > LOGGED_BYTES
            bar = progress_bar("loading", total, "bytes", shown=shown)
            self._show = self._open.enter_context(bar)
        self._show(done, "")
        if done >= total:
            self._open.close()
